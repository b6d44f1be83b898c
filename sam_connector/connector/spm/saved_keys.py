"""Which sequences the inner connector has saved, for which sessions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from sam_connector.connector.spm.sequences import TokenSequence
from sam_connector.core.types import BlockHash, GroupId, SessionKey
from sam_connector.pooling.key_space import Chunk
from sam_connector.pooling.tracker import SessionKeyTracker

#: The only KV cache group of the models whose keys are tracked.
_GROUP = GroupId(0)


class SavedKeys:
    """Keys of the inner connector, named by the block hashes that they stand for.

    Args:
        whole_sequences: a key stands for a whole sequence, named by its last block;
            otherwise each block has one.
        max_unclaimed: keys remembered that no session has claimed yet.
    """

    def __init__(self, *, whole_sequences: bool, max_unclaimed: int = 65_536) -> None:
        self._whole_sequences = whole_sequences
        self._max_unclaimed = max_unclaimed
        self.tracker = SessionKeyTracker()
        #: Saved, and perhaps of a session that is not told apart yet.
        self._saved: OrderedDict[BlockHash, None] = OrderedDict()

    def add_saved(self, hashes: list[BlockHash]) -> None:
        """The blocks with these hashes, from the first of a sequence on, are saved."""
        for block_hash in hashes[-1:] if self._whole_sequences else hashes:
            self._saved[block_hash] = None
            self._saved.move_to_end(block_hash)
        while len(self._saved) > self._max_unclaimed:
            self._saved.popitem(last=False)

    def num_saved(self, sequence: TokenSequence, num_blocks: int) -> int:
        """How long the longest saved prefix within ``num_blocks`` is."""
        for index in range(min(num_blocks, len(sequence)) - 1, -1, -1):
            if self._is_saved(sequence.hashes[index]):
                return index + 1
        return 0

    def claim(self, session: SessionKey, sequence: TokenSequence) -> None:
        """The session has every saved key of the sequence."""
        chunks = [(_GROUP, h) for h in sequence.hashes if self._is_saved(h)]
        if chunks:
            self.tracker.add(session, chunks)

    def drop(self, hashes: Iterable[BlockHash]) -> None:
        """They turned out not to be there."""
        chunks: list[Chunk] = []
        for block_hash in hashes:
            self._saved.pop(block_hash, None)
            chunks.append((_GROUP, block_hash))
        self.tracker.drop_chunks(chunks)

    def clear(self) -> None:
        self._saved.clear()
        self.tracker.clear()

    def _is_saved(self, block_hash: BlockHash) -> bool:
        return block_hash in self._saved or bool(
            self.tracker.num_sessions((_GROUP, block_hash))
        )
