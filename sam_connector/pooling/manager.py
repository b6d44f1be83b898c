"""The pooling manager: signatures; being filled in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sam_connector.core.clock import Clock
from sam_connector.core.types import SessionKey
from sam_connector.pooling.events import Ended, PoolEvent, Published, Recalled
from sam_connector.pooling.key_space import Chunk, KeySpace
from sam_connector.pooling.manifest import ManifestContext
from sam_connector.pooling.settings import PoolingConfig
from sam_connector.storage.port import ManifestStore, StoreBackend


class SessionPoolingManager:
    """What is known of a store and its sessions; engine thread only."""

    def __init__(
        self,
        store: StoreBackend,
        manifests: ManifestStore | None,
        keys: KeySpace,
        config: PoolingConfig,
        *,
        clock: Clock,
        wall_clock: Callable[[], float] = time.time,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        raise NotImplementedError

    def lookup(self, chunks: Sequence[Chunk]) -> list[bool | None]:
        raise NotImplementedError

    def on_written(self, session: SessionKey | None, chunks: Sequence[Chunk]) -> None:
        raise NotImplementedError

    def on_missing(self, chunks: Sequence[Chunk]) -> None:
        raise NotImplementedError

    def track(self, session: SessionKey, chunks: Sequence[Chunk]) -> None:
        raise NotImplementedError

    def is_known(self, chunk: Chunk) -> bool:
        raise NotImplementedError

    def chunks_of(self, session: SessionKey) -> list[Chunk]:
        raise NotImplementedError

    def unshared_tail(
        self, session: SessionKey, chunks: Sequence[Chunk]
    ) -> list[Chunk]:
        raise NotImplementedError

    def set_lease(self, session: SessionKey, expire_at: float) -> None:
        raise NotImplementedError

    def publish(
        self,
        session: SessionKey,
        contexts: Sequence[ManifestContext],
        *,
        parent: SessionKey | None = None,
        lease_s: float = 0.0,
    ) -> None:
        raise NotImplementedError

    def recall(self, session: SessionKey) -> int:
        raise NotImplementedError

    def end(self, session: SessionKey, *, purge_chunks: Sequence[Chunk] = ()) -> int:
        raise NotImplementedError

    def take_events(self) -> list[PoolEvent]:
        raise NotImplementedError

    @property
    def has_events(self) -> bool:
        raise NotImplementedError

    @property
    def num_open(self) -> int:
        raise NotImplementedError

    def clear(self) -> None:
        raise NotImplementedError

    def set_fingerprint(self, fingerprint: str) -> None:
        raise NotImplementedError

    def stats(self) -> dict[str, int | float]:
        raise NotImplementedError

    def check_integrity(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


__all__ = [
    "Ended",
    "PoolEvent",
    "PoolingConfig",
    "Published",
    "Recalled",
    "SessionPoolingManager",
]
