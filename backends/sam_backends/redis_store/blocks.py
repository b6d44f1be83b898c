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
from typing import NamedTuple, Self

from typing_extensions import override

from sam_backends.redis_store.runner import Argument, Command, Reply, Runner
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


class _Script(NamedTuple):
    """Says something of each of its keys, as a string of 0 and 1."""

    text: bytes
    sha: str

    @classmethod
    def of(cls, text: bytes) -> Self:
        return cls(text, hashlib.sha1(text, usedforsecurity=False).hexdigest())


#: Which keys there are. A command for each takes several times as long.
_EXISTS = _Script.of(b"""
local answer = {}
for i, key in ipairs(KEYS) do
  answer[i] = redis.call('EXISTS', key)
end
return table.concat(answer)
""")

#: Lengthens the lives of keys and says which there are.
#: ``EXPIRE … GT`` alone cannot tell a key that is missing from one that lives longer.
_TOUCH = _Script.of(b"""
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
""")


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
        names = [str(key) for key in keys]
        if not self._runner.has_scripts_over_many_keys:
            commands = [("EXISTS", name) for name in names]
            return _result(self._runner.run(commands, deadline))
        return _result(self._run_script(_EXISTS, names, (), deadline))

    @override
    def touch(
        self, keys: Sequence[StoreKey], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        ttl_ms = millis(ttl_s)
        names = [str(key) for key in keys]
        if not self._runner.has_scripts_over_many_keys:
            return self._touch_each(names, ttl_ms, deadline)
        return _result(self._run_script(_TOUCH, names, (ttl_ms,), deadline))

    @override
    def delete(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        commands = [("UNLINK", str(key)) for key in keys]
        return _result(self._runner.run(commands, deadline))

    @override
    def close(self) -> None:
        self._runner.close()

    def _run_script(
        self,
        script: _Script,
        names: Sequence[str],
        arguments: Sequence[Argument],
        deadline: float,
    ) -> list[Reply]:
        """In one go; the server is told the script if it does not know it."""
        shares = [
            names[start : start + _MAX_KEYS]
            for start in range(0, len(names), _MAX_KEYS)
        ]
        rests = [(len(share), *share, *arguments) for share in shares]
        replies = self._runner.run(
            [("EVALSHA", script.sha, *rest) for rest in rests], deadline
        )
        unknown = [n for n, reply in enumerate(replies) if _is_no_script(reply)]
        if unknown:
            again = [("EVAL", script.text, *rests[n]) for n in unknown]
            told = self._runner.run(again, deadline)
            for n, reply in zip(unknown, told, strict=True):
                replies[n] = reply
        return [
            digit
            for share, reply in zip(shares, replies, strict=True)
            for digit in _digits(reply, len(share))
        ]

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


def _is_no_script(reply: Reply) -> bool:
    return isinstance(reply, StoreError) and str(reply).startswith("NOSCRIPT")


def _digits(reply: Reply, count: int) -> list[Reply]:
    """A script's answer, key by key."""
    if isinstance(reply, bytes) and len(reply) == count:
        return [int(digit == ord("1")) for digit in reply]
    if not isinstance(reply, StoreError):
        reply = StoreError(f"an answer of no sense: {reply!r}")
    return [reply] * count


def _result(replies: Sequence[Reply]) -> BatchResult:
    outcomes = [_outcome(reply) for reply in replies]
    errors = (reply for reply in replies if isinstance(reply, StoreError))
    return BatchResult(outcomes, next(errors, None))


def _outcome(reply: Reply) -> Outcome:
    if isinstance(reply, StoreFull):
        return Outcome.FULL
    if isinstance(reply, StoreError):
        return Outcome.FAILED
    return Outcome.DONE if reply else Outcome.MISSING
