"""Names of values in a store.

Every part that could make bytes mean something else is in the name. The text form
is fixed: several versions and several tools read and write the same store.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple, Self
from urllib.parse import quote, unquote

from sam_connector.core.types import BlockHash, GroupId, SessionKey

_BLOCKS = "sam1"
_MANIFESTS = "sam1m"


class StoreKey(NamedTuple):
    """Name of one value: blocks of one KV cache group, as one rank has them.

    Attributes:
        tenant: whose; tenants never share values.
        fingerprint: of everything that determines the bytes of a block besides its
            content: model, dtypes, geometry, layout, hash algorithm. Hexadecimal.
        group_id: KV cache group.
        rank: which of the ranks' shares it is.
        block_hash: of the last block in the value; a block's hash covers all the
            blocks before it.
        part: blocks larger than a value are cut into several.
    """

    tenant: str
    fingerprint: str
    group_id: GroupId
    rank: int
    block_hash: BlockHash
    part: int = 0

    def __str__(self) -> str:
        return (
            f"{_BLOCKS}:{quote(self.tenant, safe='')}:{self.fingerprint}"
            f":{self.group_id}:{self.rank}:{self.block_hash.hex()}:{self.part}"
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of ``str``.

        Raises:
            ValueError: it is not such a name.
        """
        version, tenant, fingerprint, group_id, rank, block_hash, part = text.split(":")
        if version != _BLOCKS:
            raise ValueError(f"not a block's name: {text!r}")
        return cls(
            tenant=unquote(tenant),
            fingerprint=fingerprint,
            group_id=GroupId(int(group_id)),
            rank=int(rank),
            block_hash=BlockHash(bytes.fromhex(block_hash)),
            part=int(part),
        )


@dataclass(frozen=True, slots=True)
class ManifestKey:
    """Name of a session's manifest.

    The session id is hashed: it is the client's text, of any length and content.

    Attributes:
        session: tenant and session id.
        fingerprint: as in ``StoreKey``; contexts are block hashes, which mean nothing
            to another model.
    """

    session: SessionKey
    fingerprint: str

    def __str__(self) -> str:
        digest = hashlib.sha256(self.session.session_id.encode()).hexdigest()
        tenant = quote(self.session.tenant, safe="")
        return f"{_MANIFESTS}:{tenant}:{self.fingerprint}:{digest}"
