"""External hits: ordinary requests served from the tier."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING, Any

from sam_connector.connector.tier.jobs import Copy, Job
from sam_connector.connector.tier.state import TierState
from sam_connector.connector.tier.store_jobs import TransferEnd
from sam_connector.connector.tier.values import Value
from sam_connector.core.slot_pool import Content, Slot
from sam_connector.core.types import BlockHash, GroupId
from sam_connector.pooling.transfer_queue import Priority
from sam_connector.transfer.contract import Direction
from sam_connector.vllm_adapter.chains import ChainReader

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(eq=False, slots=True, kw_only=True)
class _Arrival:
    """A request's blocks, some of which have to come from the store first.

    Attributes:
        request_id: who waits.
        blocks: content, the engine's block and position of each.
        deadline: the request computes if they are not all there by then.
        num_awaited: values that have not arrived.
        slots: pinned until the request loads from them.
    """

    request_id: str
    blocks: list[tuple[Content, Any, int]]
    deadline: float
    num_awaited: int = 0
    slots: list[Slot] = field(default_factory=list)
    is_over: bool = False


class RequestLoads:
    """What of a request's prompt comes from the tier, or from the store behind it.

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
        #: Those of them that wait for the store first.
        self._arrivals: dict[str, _Arrival] = {}

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
            ``None`` if it is better to ask again: the next blocks are on their way to
            the engine for somebody else, or the store has not said what it has.
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
        blocks: list[tuple[Content, Any, int]] = []
        values: dict[Content, Value] = {}
        for group_id, block_size in self._chains.block_sizes.items():
            ids = block_ids[group_id]
            hashes = self._chains.hashes(request, group_id)
            for index in range(len(ids) - num_tokens // block_size, len(ids)):
                content: Content = (group_id, hashes[index])
                if content not in state.slots:
                    value = self._value_at(group_id, hashes, index)
                    if value is None:
                        self.fail(request.request_id)
                        return
                    values[value.chunk] = value
                blocks.append((content, state.gpu.block(ids[index]), index))
        state.counts["external_hit_requests"] += 1
        state.counts["external_hit_tokens"] += num_tokens
        self._waiting.add(request.request_id)
        if values:
            self._fetch(request.request_id, blocks, list(values.values()))
        else:
            self._load(request.request_id, blocks)

    def fail(self, request_id: str) -> None:
        """A request waits for a load that there is no way to do: let it compute.

        Never a second time: vLLM hears of each load's end exactly once.
        """
        if request_id in self._waiting:
            return
        self._waiting.add(request_id)
        self._start_failure(request_id)

    def on_step(self) -> None:
        """Gives up on blocks that have not arrived in time."""
        if self._arrivals:
            now = self._state.clock.now()
            for arrival in list(self._arrivals.values()):
                if now >= arrival.deadline:
                    self._give_up(arrival)

    @property
    def num_arriving(self) -> int:
        """Requests that wait for the store; they wait no longer than a deadline."""
        return len(self._arrivals)

    @property
    def pinned(self) -> list[Slot]:
        """Slots pinned for requests that wait for the store."""
        return [slot for a in self._arrivals.values() for slot in a.slots]

    def abandon(self) -> None:
        """Whoever waits for the store computes."""
        for arrival in list(self._arrivals.values()):
            self._give_up(arrival)

    def on_job_ended(self, job: Job) -> None:
        assert job.request_id is not None
        if job.request_id in self._waiting:
            self._waiting.remove(job.request_id)
            if job.error is not None:
                self._failed.add(job.request_id)

    def on_request_finished(self, request_id: str) -> None:
        self._failed.discard(request_id)
        arrival = self._arrivals.get(request_id)
        if arrival is not None:
            # Its blocks are held until vLLM hears that the load is over.
            self._give_up(arrival)
        self._waiting.discard(request_id)

    # --- internals ----------------------------------------------------------------

    def _fetch(
        self,
        request_id: str,
        blocks: list[tuple[Content, Any, int]],
        values: Sequence[Value],
    ) -> None:
        """Has the store bring what the tier lacks."""
        state = self._state
        assert state.remote is not None
        arrival = _Arrival(
            request_id=request_id,
            blocks=blocks,
            deadline=state.clock.now() + state.remote.config.store_load_timeout_s,
            num_awaited=len(values),
        )
        self._arrivals[request_id] = arrival
        self._pin(arrival, [content for content, _, _ in blocks])
        for value in values:
            reason = state.remote.read(
                value,
                priority=Priority.LOAD,
                session=None,
                waiter=functools.partial(self._on_arrived, arrival),
            )
            if reason is not None:
                self._give_up(arrival)
            if arrival.is_over:
                return

    def _on_arrived(self, arrival: _Arrival, end: TransferEnd) -> None:
        if arrival.is_over:
            return
        if not end.is_done:
            self._give_up(arrival)
            return
        wanted = {content for content, _, _ in arrival.blocks}
        self._pin(arrival, [c for c in end.value.contents if c in wanted])
        arrival.num_awaited -= 1
        if not arrival.num_awaited:
            self._end(arrival)
            self._load(arrival.request_id, arrival.blocks)
            self._unpin(arrival)

    def _pin(self, arrival: _Arrival, contents: Sequence[Content]) -> None:
        slots = [self._state.slots.get(content) for content in contents]
        found = [slot for slot in slots if slot is not None]
        self._state.slots.pin(found)
        arrival.slots.extend(found)

    def _unpin(self, arrival: _Arrival) -> None:
        slots, arrival.slots = arrival.slots, []
        self._state.slots.unpin(slots[::-1])

    def _end(self, arrival: _Arrival) -> None:
        arrival.is_over = True
        del self._arrivals[arrival.request_id]

    def _give_up(self, arrival: _Arrival) -> None:
        self._end(arrival)
        self._unpin(arrival)
        self._start_failure(arrival.request_id)

    def _start_failure(self, request_id: str) -> None:
        """A job that every rank reports as failed."""
        self._state.counts["failed_loads"] += 1
        self._state.jobs.start(
            Direction.LOAD,
            (),
            generation=self._state.generation,
            request_id=request_id,
        )

    def _load(
        self, request_id: str, blocks: Sequence[tuple[Content, Any, int]]
    ) -> None:
        state = self._state
        copies: list[Copy] = []
        for content, block, index in blocks:
            slot = state.slots.get(content)
            if slot is None:
                # Read and lost again: a reset, or a read that came to nothing.
                self._start_failure(request_id)
                return
            copies.append(Copy(content, block, slot, index))
        state.slots.pin([copy.slot for copy in copies])
        state.jobs.start(
            Direction.LOAD,
            copies,
            generation=state.generation,
            request_id=request_id,
            deadline=state.clock.now() + state.config.max_load_wait_s,
        )

    def _value_at(
        self, group_id: GroupId, hashes: Sequence[BlockHash], index: int
    ) -> Value | None:
        store = self._state.remote
        return None if store is None else store.shape.value_at(group_id, hashes, index)

    def _num_found(
        self, group_id: GroupId, hashes: Sequence[BlockHash], first: int, last: int
    ) -> int | None:
        state = self._state
        slots, loading, store = state.slots, state.jobs.loading, state.remote
        index, num_from_store = first, 0
        while index < last:
            job = loading.get((group_id, hashes[index])) if loading else None
            if job is not None and state.clock.now() < job.deadline:
                return None
            # While nothing is being loaded, all that is here at once.
            until = index + 1 if loading else last
            num_here = slots.num_leading(group_id, hashes, index, until)
            index += num_here
            if num_here:
                continue
            if store is None:
                break
            num_readable = store.num_readable(group_id, hashes, index, last)
            if num_readable is None:
                return None
            num_from_store += num_readable
            if not num_readable or slots.num_available(num_from_store) < num_from_store:
                break
            index += num_readable
        return index - first
