"""A circuit breaker, so that a store that is down costs nobody any time."""

from __future__ import annotations

import enum
import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from sam_connector.core.clock import Clock
from sam_connector.errors import StoreDenied, StoreError, StoreTimeout, StoreUnavailable
from sam_connector.storage.key import ManifestKey, StoreKey
from sam_connector.storage.port import (
    BatchResult,
    Capabilities,
    Entry,
    ManifestRead,
    ManifestRecord,
    ManifestStore,
    Outcome,
    StoreBackend,
    WriteOutcome,
)

logger = logging.getLogger(__name__)


class BreakerState(enum.StrEnum):
    CLOSED = "closed"  # in service
    OPEN = "open"  # every call fails at once
    HALF_OPEN = "half_open"  # one call is let through to see


class CircuitBreaker:
    """Stops calls to a store that fails, and finds out when it is back.

    Opens after ``max_failures`` failures in a row, at once if the store refuses our
    credentials. After a back-off it lets one call through; if that fails, the next
    back-off is twice as long, up to ``max_backoff_s``. Thread-safe.

    Args:
        name: for the log.
        clock: monotonic time.
        max_failures: in a row.
        backoff_s: the first one; half as long to as long, at random, so that
            instances do not come back together.
        max_backoff_s: the longest.
        on_change: called when the store goes out of service or comes back, by the
            thread whose call has shown it.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        *,
        max_failures: int = 3,
        backoff_s: float = 0.5,
        max_backoff_s: float = 10.0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._on_change = on_change
        self._clock = clock
        self._max_failures = max_failures
        self._first_backoff_s = self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._num_failed = 0
        self._retry_at = 0.0
        self._counts = {"calls": 0, "failures": 0, "timeouts": 0, "opened": 0}

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def _is_in_service(self) -> bool:
        return self._state is BreakerState.CLOSED

    def allows(self) -> bool:
        """Whether to make a call now; its end must be told."""
        with self._lock:
            if self._state is BreakerState.HALF_OPEN:
                return False
            if self._state is BreakerState.OPEN:
                if self._clock.now() < self._retry_at:
                    return False
                self._state = BreakerState.HALF_OPEN
            self._counts["calls"] += 1
            return True

    def on_end(self, error: StoreError | None) -> None:
        """A call that was allowed is over.

        Args:
            error: why it failed; ``None`` if the store answered.
        """
        with self._lock:
            was_in_service = self._is_in_service
            if error is None:
                self._on_success()
            else:
                self._on_failure(error)
            has_changed = was_in_service != self._is_in_service
        if has_changed:
            self._on_change()

    def on_mistake(self) -> None:
        """A call that was allowed was never made; it says nothing about the store."""
        with self._lock:
            if self._state is BreakerState.HALF_OPEN:
                self._state = BreakerState.OPEN

    def stats(self) -> dict[str, int | str]:
        return {"state": self._state.value, **self._counts}

    def _on_success(self) -> None:
        self._num_failed = 0
        if self._state is not BreakerState.CLOSED:
            self._state = BreakerState.CLOSED
            self._backoff_s = self._first_backoff_s
            logger.warning("store %s is in service again", self._name)

    def _on_failure(self, error: StoreError) -> None:
        self._num_failed += 1
        self._counts["failures"] += 1
        self._counts["timeouts"] += isinstance(error, StoreTimeout)
        was = self._state
        must_open = (
            was is BreakerState.HALF_OPEN
            or self._num_failed >= self._max_failures
            or isinstance(error, StoreDenied)
        )
        if was is BreakerState.OPEN or not must_open:
            return
        self._state = BreakerState.OPEN
        if was is BreakerState.CLOSED:
            self._counts["opened"] += 1
            logger.warning("store %s is out of service: %s", self._name, error)
        else:
            self._backoff_s = min(self._max_backoff_s, 2 * self._backoff_s)
        # Jitter, not secrecy.
        pause_s = self._backoff_s * (0.5 + random.random() / 2)
        self._retry_at = self._clock.now() + pause_s


def _is_failure(result: BatchResult) -> StoreError | None:
    """The error, if the store did not serve; being full is serving."""
    if Outcome.FAILED not in result.outcomes:
        return None
    return result.error or _BROKEN


class GuardedStore(StoreBackend):
    """A backend behind a breaker: FAILED at once while that is open."""

    def __init__(self, store: StoreBackend, breaker: CircuitBreaker) -> None:
        self._store = store
        self.breaker = breaker

    @property
    @override
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    @override
    def put(
        self, entries: Sequence[Entry], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        return self._call(
            len(entries),
            lambda: self._store.put(entries, ttl_s=ttl_s, deadline=deadline),
        )

    @override
    def get(self, entries: Sequence[Entry], *, deadline: float) -> BatchResult:
        return self._call(
            len(entries), lambda: self._store.get(entries, deadline=deadline)
        )

    @override
    def exists(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        return self._call(
            len(keys), lambda: self._store.exists(keys, deadline=deadline)
        )

    @override
    def touch(
        self, keys: Sequence[StoreKey], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        return self._call(
            len(keys), lambda: self._store.touch(keys, ttl_s=ttl_s, deadline=deadline)
        )

    @override
    def delete(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        return self._call(
            len(keys), lambda: self._store.delete(keys, deadline=deadline)
        )

    @override
    def close(self) -> None:
        self._store.close()

    def _call(self, num_values: int, call: Callable[[], BatchResult]) -> BatchResult:
        if not num_values:
            # Nothing would be sent: it must not close the breaker.
            return BatchResult([])
        if not self.breaker.allows():
            return BatchResult([Outcome.FAILED] * num_values, _OPEN)
        result: BatchResult = _make(self.breaker, call, _is_failure)
        return result


class GuardedManifests(ManifestStore):
    """The same for manifests."""

    def __init__(self, store: ManifestStore, breaker: CircuitBreaker) -> None:
        self._store = store
        self._breaker = breaker

    @override
    def write(
        self,
        key: ManifestKey,
        record: ManifestRecord,
        *,
        ttl_s: float,
        deadline: float,
    ) -> WriteOutcome:
        outcome: WriteOutcome = self._call(
            lambda: self._store.write(key, record, ttl_s=ttl_s, deadline=deadline),
            lambda outcome: _UNANSWERED if outcome is WriteOutcome.FAILED else None,
            WriteOutcome.FAILED,
        )
        return outcome

    @override
    def read(
        self, key: ManifestKey, *, max_bytes: int, deadline: float
    ) -> ManifestRead:
        read: ManifestRead = self._call(
            lambda: self._store.read(key, max_bytes=max_bytes, deadline=deadline),
            lambda read: (
                read.error or _BROKEN if read.outcome is Outcome.FAILED else None
            ),
            ManifestRead(Outcome.FAILED, None, _OPEN),
        )
        return read

    @override
    def touch(self, key: ManifestKey, *, ttl_s: float, deadline: float) -> Outcome:
        outcome: Outcome = self._call(
            lambda: self._store.touch(key, ttl_s=ttl_s, deadline=deadline),
            lambda outcome: _UNANSWERED if outcome is Outcome.FAILED else None,
            Outcome.FAILED,
        )
        return outcome

    @override
    def close(self) -> None:
        self._store.close()

    def _call(
        self,
        call: Callable[[], Any],
        failure: Callable[[Any], StoreError | None],
        if_open: Any,
    ) -> Any:
        if not self._breaker.allows():
            return if_open
        return _make(self._breaker, call, failure)


def _make(
    breaker: CircuitBreaker,
    call: Callable[[], Any],
    failure: Callable[[Any], StoreError | None],
) -> Any:
    """Makes a call that the breaker allowed, and tells it how it ended."""
    try:
        result = call()
    except ValueError:
        breaker.on_mistake()
        raise
    except BaseException:
        breaker.on_end(_BROKEN)
        raise
    breaker.on_end(failure(result))
    return result


_OPEN = StoreUnavailable("the store is out of service; it will be tried again")
_BROKEN = StoreUnavailable("the backend has broken its contract")
_UNANSWERED = StoreUnavailable("the store did not take a manifest")
