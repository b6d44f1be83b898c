"""From the pooling layer's names of values to a store's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sam_connector.core.types import BlockHash, GroupId, SessionKey
from sam_connector.storage.key import ManifestKey, StoreKey

#: What one value is named by here: its group and the hash of the last block in it. It
#: stands for every rank's share of it and every part that a share is cut into.
Chunk = tuple[GroupId, BlockHash]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySpace:
    """Everything in a value's name besides its content.

    Attributes:
        tenant: whose blocks are where nothing else is said.
        fingerprint: of all that determines the bytes of a block of given content.
        num_ranks: shares of every block.
        num_parts: values that a share is cut into, by group; the keys are the groups
            that there are.
    """

    tenant: str
    fingerprint: str
    num_ranks: int
    num_parts: Mapping[GroupId, int]

    def keys(self, chunk: Chunk, *, tenant: str | None = None) -> list[StoreKey]:
        """Names of all that must be there for the chunk to be there."""
        return [
            key
            for rank in range(self.num_ranks)
            for key in self.rank_keys(chunk, rank, tenant=tenant)
        ]

    def rank_keys(
        self, chunk: Chunk, rank: int, *, tenant: str | None = None
    ) -> list[StoreKey]:
        """Names of one rank's share."""
        group_id, block_hash = chunk
        return [
            StoreKey(
                tenant=self.tenant if tenant is None else tenant,
                fingerprint=self.fingerprint,
                group_id=group_id,
                rank=rank,
                block_hash=block_hash,
                part=part,
            )
            for part in range(self.num_parts[group_id])
        ]

    def manifest_key(self, session: SessionKey) -> ManifestKey:
        """Name of a session's manifest, among those of its own tenant."""
        return ManifestKey(session, self.fingerprint)
