"""How much memory this process may still take before the kernel kills something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_bytes(*, meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """The smaller of what the machine and the container have left.

    Args:
        meminfo: the kernel's table of the machine's memory.
        cgroup: the container's control group, version 2.

    Returns:
        ``None`` where neither can be read.
    """
    return min(
        (*_machine_bytes(meminfo), *_container_bytes(cgroup)),
        default=None,
    )


def _machine_bytes(meminfo: Path) -> Iterator[int]:
    for name, value in _table(meminfo):
        if name == "MemAvailable:":
            yield value * 1024


def _container_bytes(cgroup: Path) -> Iterator[int]:
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        # No container, or "max": no limit.
        return
    # Cached files count as used, but make room.
    cached = dict(_table(cgroup / "memory.stat")).get("inactive_file", 0)
    yield max(0, limit - used + cached)


def _table(path: Path) -> list[tuple[str, int]]:
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return []
    return [(row[0], int(row[1])) for row in rows if len(row) > 1 and row[1].isdigit()]
