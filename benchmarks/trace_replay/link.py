"""The link between GPU and host in virtual time."""

from __future__ import annotations

from sam_connector.transfer.contract import Direction


class HostLink:
    """Copies of one direction run one after the other, as the copy engine's do.

    Args:
        bytes_per_s: each way.

    Attributes:
        num_bytes: moved so far, both ways.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = dict.fromkeys(Direction, 0.0)
        self.num_bytes = 0

    def copy(self, direction: Direction, num_bytes: int, start_s: float) -> float:
        """Queues a copy that may start at ``start_s``; returns when it ends."""
        self.num_bytes += num_bytes
        begin_s = max(start_s, self._free_at[direction])
        self._free_at[direction] = begin_s + num_bytes / self._bytes_per_s
        return self._free_at[direction]

    def num_busy(self, now_s: float) -> int:
        """Directions that are copying."""
        return sum(free_at > now_s for free_at in self._free_at.values())
