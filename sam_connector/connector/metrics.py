"""The store in vLLM's ``/metrics``, through the hooks that vLLM has for connectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

#: Of what has happened since the last time.
COUNTERS: Mapping[str, str] = {
    "store_read_bytes": "Bytes read from the session store.",
    "store_write_bytes": "Bytes written to the session store.",
    "store_read_failed": "Values that could not be read from the session store.",
    "store_write_failed": "Values that the session store did not take.",
    "store_lookups": "Values that requests asked the session store for.",
    "store_lookup_hits": "Those of them that were there.",
    "store_breaker_opened": "Times that the session store went out of service.",
}

#: 1 while the store is in service.
UP = "store_up"

_PREFIX = "vllm:sam_"


class StoreStats(KVConnectorStats):
    """``data`` has the gauge and the counters' growth; a plain dict of numbers."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> StoreStats:
        for name, value in other.data.items():
            known = 0 if name == UP else self.data.get(name, 0)
            self.data[name] = known + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class StoreMeter:
    """Turns totals into what has changed since they were last reported."""

    def __init__(self) -> None:
        self._reported: dict[str, int] = {}
        self._next_at = 0.0

    def is_due(self, now: float, *, is_up: bool) -> bool:
        """Whether to measure: once in a second, though asked in every step, and at
        once when the store has gone or come back: no step may follow."""
        if now < self._next_at and self._reported.get(UP) == is_up:
            return False
        self._next_at = now + 1.0
        return True

    def measure(self, totals: Mapping[str, Any]) -> StoreStats | None:
        """The stats to report now; ``None`` if nothing has changed."""
        now = {name: int(totals[name]) for name in (*COUNTERS, UP)}
        if now == self._reported:
            return None
        data = {name: now[name] - self._reported.get(name, 0) for name in COUNTERS}
        data[UP] = now[UP]
        self._reported = now
        return StoreStats(data=data)


class StorePromMetrics(KVConnectorPromMetrics):
    """``vllm:sam_store_up`` and the counters, one series per engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._up = self._per_engine(
            self._gauge_cls,
            UP,
            "1 if the session store served the last call, else 0.",
        )
        self._counters = {
            name: self._per_engine(self._counter_cls, name, text)
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if UP in transfer_stats_data:
            self._up[engine_idx].set(transfer_stats_data[UP])
        for name, counter in self._counters.items():
            counter[engine_idx].inc(transfer_stats_data.get(name, 0))

    def _per_engine(self, kind: Any, name: str, text: str) -> Any:
        metric = kind(
            name=f"{_PREFIX}{name}", documentation=text, labelnames=self._labelnames
        )
        return create_metric_per_engine(metric, self.per_engine_labelvalues)
