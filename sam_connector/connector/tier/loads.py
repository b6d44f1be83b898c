"""External hits: ordinary requests served from the tier."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import TYPE_CHECKING

from sam_connector.connector.tier.jobs import Copy, Job
from sam_connector.connector.tier.state import TierState
from sam_connector.core.slot_pool import Content
from sam_connector.core.types import BlockHash, GroupId
from sam_connector.transfer.contract import Direction
from sam_connector.vllm_adapter.chains import ChainReader

if TYPE_CHECKING:
    from vllm.v1.request import Request


class RequestLoads:
    """What of a request's prompt comes from the tier.

    All loads are asynchronous: the request waits until its blocks are there, while
    others run. (A synchronous load that fails leaves blocks that other requests of
    the same step already read.)

    Args:
        state: of the tier.
        chains: reads requests' hashes.
    """

    def __init__(self, state: TierState, chains: ChainReader) -> None:
        self._state = state
        self._chains = chains
        #: Token granularity at which every group has whole blocks.
        self._alignment = lcm(*chains.block_sizes.values())
        #: Requests whose load has failed; they compute.
        self._failed: set[str] = set()
        #: Requests that live and wait for a load.
        self._waiting: set[str] = set()

    def num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> int | None:
        """Tokens beyond ``num_computed_tokens`` that the tier has.

        Free of side effects: vLLM asks again after a failed allocation, and drops
        the answer for requests that must not read a cache.

        Args:
            request: waiting.
            num_computed_tokens: its local hit, in whole blocks.

        Returns:
            A multiple of the block size that leaves at least one token to compute;
            ``None`` if the next blocks are on their way to the engine for somebody
            else, so that it is better to ask again.
        """
        if request.skip_reading_prefix_cache or request.request_id in self._failed:
            return 0
        end = (request.num_tokens - 1) // self._alignment * self._alignment
        for group_id, block_size in self._chains.block_sizes.items():
            if end <= num_computed_tokens:
                return 0
            hashes = self._chains.hashes(request, group_id)
            first = num_computed_tokens // block_size
            last = min(end // block_size, len(hashes))
            found = self._num_found(group_id, hashes, first, last)
            if found is None:
                return None
            end = (first + found) * block_size // self._alignment * self._alignment
        return max(0, end - num_computed_tokens)

    def start(
        self, request: Request, block_ids: Sequence[Sequence[int]], num_tokens: int
    ) -> None:
        """Blocks were allocated; loads the last ``num_tokens`` tokens of them.

        Which blocks these are follows from the allocation alone, whatever a look-up
        may have said before.
        """
        state = self._state
        copies: list[Copy] = []
        for group_id, block_size in self._chains.block_sizes.items():
            ids = block_ids[group_id]
            hashes = self._chains.hashes(request, group_id)
            for index in range(len(ids) - num_tokens // block_size, len(ids)):
                content: Content = (group_id, hashes[index])
                slot = state.slots.get(content)
                if slot is None:
                    self.fail(request.request_id)
                    return
                block = state.gpu.block(ids[index])
                copies.append(Copy(content, block, slot, index))
        state.slots.pin([copy.slot for copy in copies])
        state.counts["external_hit_requests"] += 1
        state.counts["external_hit_tokens"] += num_tokens
        state.jobs.start(
            Direction.LOAD,
            copies,
            generation=state.generation,
            request_id=request.request_id,
            deadline=state.clock.now() + state.config.max_load_wait_s,
        )
        self._waiting.add(request.request_id)

    def fail(self, request_id: str) -> None:
        """A request waits for a load that there is no way to do: let it compute.

        Never a second time: vLLM hears of each load's end exactly once.
        """
        if request_id in self._waiting:
            return
        self._state.counts["failed_loads"] += 1
        self._state.jobs.start(
            Direction.LOAD,
            (),
            generation=self._state.generation,
            request_id=request_id,
        )
        self._waiting.add(request_id)

    def on_job_ended(self, job: Job) -> None:
        assert job.request_id is not None
        if job.request_id in self._waiting:
            self._waiting.remove(job.request_id)
            if job.error is not None:
                self._failed.add(job.request_id)

    def on_request_finished(self, request_id: str) -> None:
        self._failed.discard(request_id)
        self._waiting.discard(request_id)

    def _num_found(
        self, group_id: GroupId, hashes: Sequence[BlockHash], first: int, last: int
    ) -> int | None:
        slots, loading = self._state.slots, self._state.jobs.loading
        for index in range(first, last):
            content = (group_id, hashes[index])
            if loading and content in loading:
                job = loading[content]
                if self._state.clock.now() < job.deadline:
                    return None
            if content not in slots:
                return index - first
        return max(0, last - first)
