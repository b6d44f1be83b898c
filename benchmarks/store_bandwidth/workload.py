"""The values that every client moves: the same keys and bytes for all of them."""

from __future__ import annotations

import mmap
import random
from dataclasses import dataclass
from pathlib import Path

from sam_connector.core.types import BlockHash, GroupId
from sam_connector.storage.key import StoreKey


class WrongBytesError(RuntimeError):
    """A client has read something that was not written."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Values in memory, and memory to read them into.

    Attributes:
        size: bytes of each value.
        keys: their names.
        values: what they are.
        buffers: where they are read to, touched before.
        keys_path: the names in a file, one a line.
        values_path: the bytes in a file, one after another.
    """

    size: int
    keys: list[StoreKey]
    values: list[memoryview]
    buffers: list[memoryview]
    keys_path: Path
    values_path: Path

    @classmethod
    def make(cls, folder: Path, size: int, num_bytes: int) -> Workload:
        """Random values of ``size`` bytes, ``num_bytes`` together."""
        num_values = num_bytes // size
        rng = random.Random(size)
        keys = [
            StoreKey(
                tenant="",
                fingerprint=f"{size:032x}",
                group_id=GroupId(0),
                rank=0,
                block_hash=BlockHash(rng.randbytes(32)),
            )
            for _ in range(num_values)
        ]
        keys_path, values_path = folder / f"keys-{size}", folder / f"values-{size}"
        keys_path.write_text("".join(f"{key}\n" for key in keys))
        values_path.write_bytes(rng.randbytes(num_values * size))
        source = memoryview(values_path.read_bytes())
        # Private, as a host pool and the C program have it: shared memory is slower.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        target = memoryview(mmap.mmap(-1, num_values * size, flags=flags))
        target[:] = bytes(len(target))
        return cls(
            size=size,
            keys=keys,
            values=[source[i * size : (i + 1) * size] for i in range(num_values)],
            buffers=[target[i * size : (i + 1) * size] for i in range(num_values)],
            keys_path=keys_path,
            values_path=values_path,
        )

    @property
    def num_bytes(self) -> int:
        return self.size * len(self.keys)

    def clear(self) -> None:
        """Nothing that was read before can pass for read now."""
        empty = bytes(self.size)
        for buffer in self.buffers:
            buffer[:] = empty

    def check(self, client: str) -> None:
        for value, buffer in zip(self.values, self.buffers, strict=True):
            if value != buffer:
                raise WrongBytesError(f"{client} has read wrong bytes")
