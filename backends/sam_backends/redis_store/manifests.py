"""Session manifests in Redis: a string key with the version in front of the data."""

from __future__ import annotations

from typing_extensions import override

from sam_backends.redis_store.blocks import millis
from sam_backends.redis_store.runner import Runner
from sam_connector.errors import StoreError, StoreFull
from sam_connector.storage.key import ManifestKey
from sam_connector.storage.port import (
    MAX_VERSION,
    ManifestRead,
    ManifestRecord,
    ManifestStore,
    Outcome,
    WriteOutcome,
)

#: Digits of a version, so that versions compare as text.
_DIGITS = 20

#: The newer version wins, in one step on the server; what is no record never does.
_WRITE = b"""
local known = redis.pcall('GETRANGE', KEYS[1], 0, 19)
if type(known) == 'string' and #known == 20 and string.match(known, '^%d+$')
  and known >= ARGV[1] and known <= ARGV[4] then return 0 end
redis.call('SET', KEYS[1], ARGV[1] .. ARGV[2], 'PX', ARGV[3])
return 1
"""

_TOUCH = b"""
local left = redis.call('PTTL', KEYS[1])
if left == -2 then return 0 end
if left >= 0 and left < tonumber(ARGV[1]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return 1
"""


class RedisManifests(ManifestStore):
    """Manifests in a Redis or Valkey.

    Args:
        runner: the way there.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @override
    def write(
        self,
        key: ManifestKey,
        record: ManifestRecord,
        *,
        ttl_s: float,
        deadline: float,
    ) -> WriteOutcome:
        version = f"{record.version:0{_DIGITS}d}"
        if not 0 <= record.version <= MAX_VERSION:
            raise ValueError(f"version {record.version} is out of range")
        command = (
            *("EVAL", _WRITE, 1, str(key)),
            *(version, record.data, millis(ttl_s), f"{MAX_VERSION:0{_DIGITS}d}"),
        )
        [reply] = self._runner.run([command], deadline)
        if isinstance(reply, StoreFull):
            return WriteOutcome.FULL
        if isinstance(reply, StoreError):
            return WriteOutcome.FAILED
        return WriteOutcome.DONE if reply == 1 else WriteOutcome.OUTDATED

    @override
    def read(
        self, key: ManifestKey, *, max_bytes: int, deadline: float
    ) -> ManifestRead:
        # One byte more, to tell what is too long.
        command = ("GETRANGE", str(key), 0, _DIGITS + max_bytes)
        [reply] = self._runner.run([command], deadline)
        if isinstance(reply, StoreError):
            return ManifestRead(Outcome.FAILED, error=reply)
        if not isinstance(reply, bytes) or not reply[:_DIGITS].isdigit():
            return ManifestRead(Outcome.MISSING)
        if len(reply) < _DIGITS or len(reply) > _DIGITS + max_bytes:
            return ManifestRead(Outcome.MISSING)
        record = ManifestRecord(int(reply[:_DIGITS]), reply[_DIGITS:])
        if record.version > MAX_VERSION:
            return ManifestRead(Outcome.MISSING)
        return ManifestRead(Outcome.DONE, record)

    @override
    def touch(self, key: ManifestKey, *, ttl_s: float, deadline: float) -> Outcome:
        command = ("EVAL", _TOUCH, 1, str(key), millis(ttl_s))
        [reply] = self._runner.run([command], deadline)
        if isinstance(reply, StoreError):
            return Outcome.FAILED
        return Outcome.DONE if reply == 1 else Outcome.MISSING

    @override
    def close(self) -> None:
        self._runner.close()
