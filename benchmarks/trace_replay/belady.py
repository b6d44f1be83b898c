"""The clairvoyant bound: evict the block whose next use is furthest away.

Same pinning, same closed loop, same block pool as the other arms; only the free
queue differs. "Next use" of a block is the first request that was not admitted yet
and contains it. Its moment is read off the timeline of a finished LRU run on the
same pool: the order of requests hardly depends on the policy, and a block whose
request is late in this run is never mistaken for one without a use.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    get_block_hash,
    make_block_hash_with_group_id,
)

from benchmarks.trace_replay.policies import Policy

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from benchmarks.trace_replay.workload import Turn, Workload

#: Evicted in ascending order.
SortKey = tuple[float, ...]


class KeyedFreeQueue:
    """A replacement of ``FreeKVCacheBlockQueue`` ordered by a key per block.

    Keys live in a heap with lazy deletion: an entry whose serial number is not the
    block's latest is skipped when it surfaces.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self._serial = 0
        self._live: dict[int, int] = {}
        self._heap: list[tuple[SortKey, int, KVCacheBlock]] = []
        for block in blocks:
            self._push(block, (-math.inf,))

    def key(self, block: KVCacheBlock) -> SortKey:
        """The block's place among free blocks; overridden by policies."""
        raise NotImplementedError

    def rekey(self, block: KVCacheBlock) -> None:
        """Recomputes the place of a free block; ignores one in use."""
        if block.block_id in self._live:
            self._replace(block, self.key(block))

    def popleft(self) -> KVCacheBlock:
        while self._heap:
            _, serial, block = heapq.heappop(self._heap)
            if self._live.get(block.block_id) == serial:
                self._forget(block)
                return block
        raise ValueError("No free blocks available")

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        return [self.popleft() for _ in range(n)]

    def remove(self, block: KVCacheBlock) -> None:
        if block.block_id not in self._live:
            raise RuntimeError(f"remove() called on an invalid block: {block}")
        self._forget(block)

    def append(self, block: KVCacheBlock) -> None:
        self._push(block, self.key(block))

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            self.append(block)

    def prepend_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            self._push(block, (-math.inf,))

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        ordered = [
            block
            for _, serial, block in sorted(self._heap, key=lambda entry: entry[:2])
            if self._live.get(block.block_id) == serial
        ]
        start = 0 if cursor is None else ordered.index(cursor) + 1
        return iter(ordered[start:])

    def _push(self, block: KVCacheBlock, key: SortKey) -> None:
        self.num_free_blocks += 1
        self._replace(block, key)

    def _replace(self, block: KVCacheBlock, key: SortKey) -> None:
        self._serial += 1
        self._live[block.block_id] = self._serial
        heapq.heappush(self._heap, (key, self._serial, block))

    def _forget(self, block: KVCacheBlock) -> None:
        del self._live[block.block_id]
        self.num_free_blocks -= 1


class NextUse:
    """When each block hash is needed next, given the requests admitted so far."""

    def __init__(self, workload: Workload, arrival_s: Sequence[float]) -> None:
        self._uses: dict[bytes, list[tuple[float, int]]] = {}
        self._admitted: set[int] = set()
        block_size = workload.block_size
        # Latest first, so that the next use is at the end and pops in O(1).
        order = sorted(workload.turns, key=lambda t: -arrival_s[t.index])
        for turn in order:
            num_full = (turn.input_tokens - 1) // block_size
            use = (arrival_s[turn.index], turn.index)
            for block_hash in turn.context.block_hashes[:num_full]:
                self._uses.setdefault(block_hash, []).append(use)

    def admitted(self, index: int) -> None:
        self._admitted.add(index)

    def at(self, block_hash: bytes) -> float:
        uses = self._uses.get(block_hash, [])
        while uses and uses[-1][1] in self._admitted:
            uses.pop()
        return uses[-1][0] if uses else math.inf


class BeladyQueue(KeyedFreeQueue):
    """Furthest next use first; of equals, the block deepest in its context."""

    def __init__(
        self,
        blocks: Sequence[KVCacheBlock],
        next_use: NextUse,
        on_taken: Callable[[KVCacheBlock], None],
    ) -> None:
        self._next_use = next_use
        self._on_taken = on_taken
        super().__init__(blocks)

    @override
    def key(self, block: KVCacheBlock) -> SortKey:
        if block.block_hash is None:
            return (-math.inf,)
        next_use_s = self._next_use.at(get_block_hash(block.block_hash))
        return (-next_use_s, -(block.block_hash_num_tokens or 0))

    @override
    def popleft(self) -> KVCacheBlock:
        block = super().popleft()
        self._on_taken(block)
        return block


class _Host:
    """A second tier that is told the future as well: what the pool gives up goes
    there, and of that whatever is needed last goes first."""

    def __init__(self, num_blocks: int, next_use: NextUse) -> None:
        self._num_blocks = num_blocks
        self._next_use = next_use
        self._live: dict[bytes, int] = {}
        self._heap: list[tuple[float, int, int, bytes]] = []
        self._serial = 0

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._live

    def add(self, block_hash: bytes, depth: int) -> None:
        next_use_s = self._next_use.at(block_hash)
        if next_use_s == math.inf or not self._num_blocks:
            return
        self._serial += 1
        self._live[block_hash] = self._serial
        entry = (-next_use_s, -depth, self._serial, block_hash)
        heapq.heappush(self._heap, entry)
        while len(self._live) > self._num_blocks:
            _, _, serial, last = heapq.heappop(self._heap)
            if self._live.get(last) == serial:
                del self._live[last]

    def discard(self, block_hash: bytes) -> None:
        self._live.pop(block_hash, None)


class BeladyPolicy(Policy):
    """Installs :class:`BeladyQueue` in a fresh block pool.

    Args:
        arrival_s: when each request arrives.
        host_tokens: what a second tier holds besides; bringing it back is free.
    """

    loads_are_free = True

    def __init__(self, arrival_s: Sequence[float], *, host_tokens: int = 0) -> None:
        self.name = "belady_tier" if host_tokens else "belady"
        self._arrival_s = arrival_s
        self._host_tokens = host_tokens

    @override
    def attach(
        self, manager: KVCacheManager, kv_cache_config: KVCacheConfig, plan: Workload
    ) -> None:
        super().attach(manager, kv_cache_config, plan)
        self._block_size = plan.block_size
        self._next_use = NextUse(plan, self._arrival_s)
        self._host = _Host(self._host_tokens // plan.block_size, self._next_use)
        free = self._pool.free_block_queue.get_all_free_blocks()
        self._queue = BeladyQueue(free, self._next_use, self._on_taken)
        self._pool.free_block_queue = self._queue  # type: ignore[assignment]

    @override
    def look_up(self, request: Request, num_local: int) -> int:
        size = self._block_size
        end = (request.num_tokens - 1) // size
        index = first = num_local // size
        while index < end and request.block_hashes[index] in self._host:
            index += 1
        return (index - first) * size

    @override
    def on_blocks_assigned(
        self, turn: Turn, request: Request, blocks: KVCacheBlocks, num_external: int
    ) -> None:
        for block_hash in request.block_hashes:
            self._host.discard(block_hash)

    def _on_taken(self, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            block_hash = get_block_hash(block.block_hash)
            self._host.add(block_hash, block.block_hash_num_tokens or 0)

    @override
    def on_admitted(self, turn: Turn, request: Request, num_cached: int) -> None:
        self._next_use.admitted(turn.index)
        # Blocks behind a gap are still free: the request that would have used them
        # has just recomputed them, so their next use moved.
        first = num_cached // turn.context.block_size
        for block_hash in request.block_hashes[first:]:
            self._rekey_copies(block_hash)

    def _rekey_copies(self, block_hash: BlockHash) -> None:
        key = make_block_hash_with_group_id(block_hash, 0)
        entry = self._pool.cached_block_hash_to_block._cache.get(key)
        copies = entry.values() if isinstance(entry, dict) else [entry]
        for block in copies:
            if block is not None:
                self._queue.rekey(block)
