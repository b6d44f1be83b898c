"""What processes of a session hold, read from ``/proc``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_SHARED_MEMORY = "/dev/shm/"
_DELETED = " (deleted)"


def processes_of(session: int) -> list[int]:
    """Living processes of a session, its leader included."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # The name, in parentheses, may itself contain spaces and parentheses.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            state, session_of_process = fields[0], int(fields[3])
            if session_of_process == session and state != "Z":
                found.append(int(folder.name))
    return found


def shared_memory_of(session: int) -> set[Path]:
    """Files of shared memory that a session has mapped or open and not yet deleted."""
    return {
        Path(name)
        for process in processes_of(session)
        for name in _names(Path(f"/proc/{process}"))
        if name.startswith(_SHARED_MEMORY) and not name.endswith(_DELETED)
    }


def _names(process: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in (process / "maps").read_text().splitlines():
            yield line.partition("/")[1] + line.partition("/")[2]
    with contextlib.suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                yield os.readlink(descriptor)
