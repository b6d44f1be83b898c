"""Blocks in Redis: one string key each, with an exact life.

A value that is written again is written over: it should have the same content by its
name, but a damaged one must not stay. It keeps the longer of the two lives. New values,
the usual case, go with ``SET … NX PX``; what turns out to be there is sent once more
and overwritten in a transaction or a script.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from typing_extensions import override

from sam_backends.redis_store.runner import Command, Reply, Runner
from sam_connector.errors import StoreError, StoreFull
from sam_connector.storage.key import StoreKey
from sam_connector.storage.port import (
    BatchResult,
    Capabilities,
    Entry,
    Outcome,
    StoreBackend,
)

#: Keys in one script: it blocks the server while it runs.
_MAX_KEYS = 1_000

#: A thousand years; a server refuses what does not fit its clock.
_MAX_TTL_MS = 1_000 * 365 * 86_400_000

#: Lengthens the lives of keys and says which there are, as a string of 0 and 1.
#: ``EXPIRE … GT`` alone cannot tell a key that is missing from one that lives longer.
_TOUCH = b"""
local answer = {}
for i, key in ipairs(KEYS) do
  local left = redis.call('PTTL', key)
  if left == -2 then
    answer[i] = '0'
  else
    answer[i] = '1'
    if left >= 0 and left < tonumber(ARGV[1]) then
      redis.call('PEXPIRE', key, ARGV[1])
    else
      redis.call('TOUCH', key)
    end
  end
end
return table.concat(answer)
"""

_TOUCH_SHA = hashlib.sha1(_TOUCH, usedforsecurity=False).hexdigest()


class RedisStore(StoreBackend):
    """Values in a Redis or Valkey.

    Args:
        runner: the way there.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    @override
    def capabilities(self) -> Capabilities:
        return Capabilities(
            exact_ttl=True,
            touch=True,
            delete=True,
            is_shared=True,
            max_value_bytes=512 << 20,
        )

    @override
    def put(
        self, entries: Sequence[Entry], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        return _result(self._runner.write(entries, millis(ttl_s), deadline))

    @override
    def get(self, entries: Sequence[Entry], *, deadline: float) -> BatchResult:
        return _result(self._runner.read(entries, deadline))

    @override
    def exists(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        commands = [("EXISTS", str(key)) for key in keys]
        return _result(self._runner.run(commands, deadline))

    @override
    def touch(
        self, keys: Sequence[StoreKey], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        ttl_ms = millis(ttl_s)
        names = [str(key) for key in keys]
        if not self._runner.has_scripts_over_many_keys:
            return self._touch_each(names, ttl_ms, deadline)
        replies: list[Reply] = []
        for start in range(0, len(names), _MAX_KEYS):
            replies += self._touch_batch(
                names[start : start + _MAX_KEYS], ttl_ms, deadline
            )
        return _result(replies)

    @override
    def delete(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        commands = [("UNLINK", str(key)) for key in keys]
        return _result(self._runner.run(commands, deadline))

    @override
    def close(self) -> None:
        self._runner.close()

    def _touch_batch(
        self, names: Sequence[str], ttl_ms: int, deadline: float
    ) -> list[Reply]:
        """One script over many keys; the server is told it if it does not know it."""
        rest: Command = (len(names), *names, ttl_ms)
        [reply] = self._runner.run([("EVALSHA", _TOUCH_SHA, *rest)], deadline)
        if isinstance(reply, StoreError) and str(reply).startswith("NOSCRIPT"):
            [reply] = self._runner.run([("EVAL", _TOUCH, *rest)], deadline)
        if not isinstance(reply, bytes) or len(reply) != len(names):
            failure = reply if isinstance(reply, StoreError) else None
            return [failure or StoreError(f"an answer of no sense: {reply!r}")] * len(
                names
            )
        return [int(digit == ord("1")) for digit in reply]

    def _touch_each(
        self, names: Sequence[str], ttl_ms: int, deadline: float
    ) -> BatchResult:
        """In a cluster a script has the keys of one slot only."""
        commands: list[Command] = []
        for name in names:
            commands += [("PEXPIRE", name, ttl_ms, "GT"), ("EXISTS", name)]
        replies = self._runner.run(commands, deadline)
        lengthened, found = replies[::2], replies[1::2]
        return _result(
            [
                a if isinstance(a, StoreError) else b
                for a, b in zip(lengthened, found, strict=True)
            ]
        )


def millis(ttl_s: float) -> int:
    """A life in whole milliseconds, never none.

    Raises:
        ValueError: it is not more than 0, or endless.
    """
    if not ttl_s > 0 or not math.isfinite(ttl_s):
        raise ValueError(f"ttl_s must be more than 0 and finite; got {ttl_s}")
    return min(math.ceil(ttl_s * 1000), _MAX_TTL_MS)


def _result(replies: Sequence[Reply]) -> BatchResult:
    outcomes = [_outcome(reply) for reply in replies]
    errors = (
        reply
        for reply, outcome in zip(replies, outcomes, strict=True)
        if isinstance(reply, StoreError) and outcome is not Outcome.MISSING
    )
    return BatchResult(outcomes, next(errors, None))


def _outcome(reply: Reply) -> Outcome:
    if isinstance(reply, StoreFull):
        return Outcome.FULL
    if isinstance(reply, StoreError):
        # Under a name of ours, and nothing that we have written.
        is_other = str(reply).startswith("WRONGTYPE")
        return Outcome.MISSING if is_other else Outcome.FAILED
    return Outcome.DONE if reply else Outcome.MISSING
