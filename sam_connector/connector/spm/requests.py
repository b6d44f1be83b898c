"""The engine's own requests, as far as the inner connector loads and saves for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sam_connector.connector.spm.config import SpmConfig
from sam_connector.connector.spm.traits import Confirm
from sam_connector.core.clock import Clock
from sam_connector.core.types import BlockHash, GroupId
from sam_connector.vllm_adapter.chains import ChainReader

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_MAX_FAILED = 4_096


class _Load(NamedTuple):
    """What a request waits for."""

    block_ids: frozenset[int]
    hashes: Sequence[BlockHash]
    is_async: bool


@dataclass(slots=True)
class StepPlan:
    """What one step does for the engine's requests.

    Attributes:
        hidden: requests that the inner connector must not hear of.
        sync_blocks: that are loaded in the step.
        async_requests: whose loads begin in it.
        saves: block hashes of what the inner connector saves in it.
    """

    hidden: set[str] = field(default_factory=set)
    sync_blocks: set[int] = field(default_factory=set)
    async_requests: set[str] = field(default_factory=set)
    saves: list[list[BlockHash]] = field(default_factory=list)


class RequestWatch:
    """Which requests the inner connector hears of, and what its loads come to.

    Args:
        config: settings.
        chains: reads requests' hashes.
        clock: where time comes from.

    Attributes:
        group_id: the KV cache group by which content is told.
        num_failed_loads: loads that had to be computed after all.
    """

    def __init__(self, config: SpmConfig, chains: ChainReader, clock: Clock) -> None:
        self._config = config
        self._chains = chains
        self._clock = clock
        self.group_id = next(iter(chains.block_sizes), GroupId(0))
        self._live: dict[str, Request] = {}
        #: Of the last look-up that found something: tokens there, and how it loads.
        self._answers: dict[str, tuple[int, bool]] = {}
        self._loads: dict[str, _Load] = {}
        self._new_loads: list[str] = []
        #: Requests whose load has failed; they compute.
        self._failed: set[str] = set()
        #: What could not be loaded, and until when it is not tried again.
        self._failed_until: OrderedDict[BlockHash, float] = OrderedDict()
        self.num_failed_loads = 0

    @property
    def num_live(self) -> int:
        return len(self._live)

    def add(self, request: Request) -> None:
        self._live[request.request_id] = request

    def is_visible(self, request: Request) -> bool:
        """Whether the inner connector can tell the request's content from others'."""
        traits = self._config.traits
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return False
        if request.lora_request is not None and not traits.tells_lora_apart:
            return False
        return request.cache_salt is None or traits.tells_salt_apart

    def may_load(self, request: Request) -> bool:
        return request.request_id not in self._failed and self.is_visible(request)

    def checked_match(
        self, request: Request, num_computed: int, matched: int, is_async: bool
    ) -> tuple[int, bool]:
        """An answer to a look-up that the scheduler can live with.

        Whole blocks, at least one token left to compute, and nothing that could not
        be loaded a moment ago: asked for again, it would fail again.
        """
        size = self._chains.primary_block_size
        if not size:
            return matched, is_async  # nothing that could be told by its hash
        end = num_computed + matched
        limit = request.num_tokens if is_async else request.num_tokens - 1
        matched = min(end, limit) // size * size - num_computed
        if matched <= 0 or self._has_failed(request, num_computed + matched):
            return 0, False
        self._answers[request.request_id] = num_computed, is_async
        return matched, is_async

    def add_load(
        self, request: Request, block_ids: Sequence[int], num_tokens: int
    ) -> None:
        """Blocks were allocated for what a look-up has found."""
        size = self._chains.primary_block_size
        num_computed, is_async = self._answers[request.request_id]
        first = num_computed // size
        end = min(len(block_ids), first + num_tokens // size)
        hashes = self._chains.hashes(request, self.group_id)[:end]
        self._loads[request.request_id] = _Load(
            frozenset(block_ids[first:end]), hashes, is_async
        )
        self._new_loads.append(request.request_id)

    def plan_step(self, scheduled: SchedulerOutput) -> StepPlan:
        plan = StepPlan()
        new_loads, self._new_loads = self._new_loads, []
        for request_id in new_loads:
            load = self._loads[request_id]
            if load.is_async:
                plan.async_requests.add(request_id)
            else:
                plan.sync_blocks |= load.block_ids
                plan.saves.append(list(load.hashes))
        loading = set(new_loads)
        for data in scheduled.scheduled_new_reqs:
            request = self._live.get(data.req_id)
            if request is None or data.req_id in loading:
                continue
            num_scheduled = scheduled.num_scheduled_tokens.get(data.req_id, 0)
            is_whole = data.num_computed_tokens + num_scheduled >= data.prompt_len
            if not self.is_visible(request) or (
                self._config.traits.needs_whole_prompt and not is_whole
            ):
                plan.hidden.add(data.req_id)
            elif self._config.traits.confirm is Confirm.STEP and is_whole:
                count = (data.prompt_len - 1) // self._chains.primary_block_size
                plan.saves.append(
                    list(self._chains.hashes(request, self.group_id)[:count])
                )
        plan.saves = [hashes for hashes in plan.saves if hashes]
        return plan

    def on_failures(
        self, block_ids: Collection[int], request_ids: Collection[str]
    ) -> list[BlockHash]:
        """Loads have failed; returns what turned out not to be there."""
        lost: list[BlockHash] = []
        if not block_ids and not request_ids:
            return lost
        for request_id, load in list(self._loads.items()):
            if request_id in request_ids or not load.block_ids.isdisjoint(block_ids):
                del self._loads[request_id]
                self._failed.add(request_id)
                self.num_failed_loads += 1
                if load.hashes:
                    self.note_lost(load.hashes[-1])
                    lost.append(load.hashes[-1])
        return lost

    def note_lost(self, block_hash: BlockHash) -> None:
        """What ends in this block is not to be tried for a while."""
        until = self._clock.now() + self._config.failed_retry_s
        self._failed_until[block_hash] = until
        self._failed_until.move_to_end(block_hash)
        if len(self._failed_until) > _MAX_FAILED:
            self._failed_until.popitem(last=False)

    def is_lost(self, block_hash: BlockHash) -> bool:
        return self._failed_until.get(block_hash, 0.0) > self._clock.now()

    def remove(self, request: Request) -> None:
        """The request is over."""
        request_id = request.request_id
        self._live.pop(request_id, None)
        self._loads.pop(request_id, None)
        self._answers.pop(request_id, None)
        self._failed.discard(request_id)

    def clear(self) -> None:
        """All content is void, and so is what is known of it."""
        self._failed_until.clear()

    # --- internals --------------------------------------------------------------------

    def _has_failed(self, request: Request, num_tokens: int) -> bool:
        if not self._failed_until:
            return False
        size = self._chains.primary_block_size
        hashes = self._chains.hashes(request, self.group_id)
        index = num_tokens // size - 1
        return index < len(hashes) and self.is_lost(hashes[index])
