"""What both ways to a server offer: commands, and values in the caller's memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

from sam_connector.errors import StoreError
from sam_connector.storage.port import Entry

Argument: TypeAlias = str | bytes | int
Command: TypeAlias = Sequence[Argument]

#: What a server answers; an error is a value, ``None`` is nil.
Reply: TypeAlias = int | bytes | StoreError | None


class Runner(ABC):
    """Carries out commands. Thread-safe; nothing is raised for what a server does.

    What was not answered by the deadline is a ``StoreTimeout``, what was cut off or
    never sent a ``StoreUnavailable``. Commands may be sent twice, if a connection broke
    before the first was answered: all of ours may be.
    """

    @abstractmethod
    def run(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        """Sends commands, many in one go; one reply each, in order."""

    @abstractmethod
    def write(
        self, entries: Sequence[Entry], ttl_ms: int, deadline: float
    ) -> list[Reply]:
        """Writes values: each lives at least so long, and no shorter than before."""

    @abstractmethod
    def read(self, entries: Sequence[Entry], deadline: float) -> list[Reply]:
        """Reads values into their buffers: 1, or ``None`` if missing or too long."""

    @property
    @abstractmethod
    def has_scripts_over_many_keys(self) -> bool:
        """Whether one script may touch keys of different slots."""

    @abstractmethod
    def close(self) -> None:
        """Ends connections; later calls fail."""
