"""What both ways to a server offer: commands, and values in the caller's memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

from sam_connector.errors import (
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from sam_connector.storage.port import Entry

Argument: TypeAlias = str | bytes | int
Command: TypeAlias = Sequence[Argument]

#: What a server answers; an error is a value, ``None`` is nil.
Reply: TypeAlias = int | bytes | StoreError | None


class Runner(ABC):
    """Carries out commands. Thread-safe; nothing is raised for what a server does.

    What was not answered by the deadline is a ``StoreTimeout``, what was cut off or
    never sent a ``StoreUnavailable``.
    """

    @abstractmethod
    def run(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        """Sends commands in one go; one reply each, in order."""

    @abstractmethod
    def write(
        self, entries: Sequence[Entry], ttl_ms: int, deadline: float
    ) -> list[Reply]:
        """Writes values that are not there, and lengthens the life of all."""

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


_DENIED = ("NOAUTH", "WRONGPASS", "NOPERM", "ERR invalid password", "ERR AUTH")


def error_of(message: str) -> StoreError:
    """A server's error reply, in our words. Redis never repeats a password in it."""
    if message.startswith("OOM"):
        return StoreFull(message)
    if message.startswith(_DENIED):
        return StoreDenied(message)
    if message.startswith(("MOVED", "ASK")):
        return StoreUnavailable(f"a cluster needs a redis+cluster:// URL ({message})")
    return StoreUnavailable(message)


def timeout() -> StoreTimeout:
    return StoreTimeout("the store did not answer in time")


def cut(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"the connection failed: {error}")
