"""The tier's guards: each test of a known fault fails once its guard is gone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import pytest

from benchmarks.engine_config import KVShape
from sam_connector.connector.facade import SAMConnector
from sam_connector.connector.metadata import RankResult
from sam_connector.connector.scheduler import SchedulerSide
from sam_connector.connector.tier.host_tier import HostTier
from sam_connector.connector.tier.jobs import Job, JobTable
from sam_connector.connector.tier.loads import RequestLoads
from sam_connector.connector.tier.state import TierState
from sam_connector.connector.worker import WorkerSide
from sam_connector.core.slot_pool import SlotPool
from sam_connector.core.types import GroupId
from sam_connector.vllm_adapter.chains import ChainReader
from sam_connector.vllm_adapter.gpu_cache import GpuCache
from tests.connector.tier import test_known_faults_aborts as aborts
from tests.connector.tier import test_known_faults_copies as copies
from tests.connector.tier import test_known_faults_failures as failures
from tests.connector.tier import test_known_faults_hits as hits
from tests.connector.tier import test_known_faults_preemption as preemption
from tests.connector.tier import test_known_faults_resets as resets

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]


# --- guards that are taken away -------------------------------------------------------


def copies_do_not_hold_blocks(patch: Patch) -> None:
    patch.setattr(GpuCache, "pin", lambda self, blocks: None)
    patch.setattr(GpuCache, "unpin", lambda self, blocks: None)


def loads_do_not_hold_slots(patch: Patch) -> None:
    """Pinned for the books alone: the slot stays among those to be given away."""
    pin, unpin = SlotPool.pin, SlotPool.unpin

    def pin_and_queue(self: SlotPool, slots: Any) -> None:
        pin(self, slots)
        self.free_queue.prepend_n(slots)

    def unpin_queued(self: SlotPool, slots: Any) -> None:
        for slot in slots:
            if slot.content is not None and slot.prev_free_block is not None:
                self.free_queue.remove(slot)
        unpin(self, slots)

    patch.setattr(SlotPool, "pin", pin_and_queue)
    patch.setattr(SlotPool, "unpin", unpin_queued)
    # The books would show it at once; what matters are the bytes.
    for books in (SlotPool, HostTier):
        patch.setattr(books, "check_integrity", lambda self: None)


def content_is_offered_while_it_is_saved(patch: Patch) -> None:
    store = TierState.store

    def publish_at_once(self: TierState, sources: Any, **more: Any) -> Any:
        job = store(self, sources, **more)
        for copy in () if job is None else job.copies:
            self.slots.publish(copy.slot, copy.content)
        return job

    patch.setattr(TierState, "store", publish_at_once)


def one_rank_speaks_for_all(patch: Patch) -> None:
    init = JobTable.__init__
    patch.setattr(JobTable, "__init__", lambda self, num_ranks: init(self, 1))


def a_rank_is_counted_each_time_it_reports(patch: Patch) -> None:
    report = JobTable.report
    numbers = iter(range(100, 10_000))

    def count(self: JobTable, results: Any) -> list[Job]:
        renamed = [r._replace(rank=next(numbers)) for r in results]
        return report(self, renamed)

    patch.setattr(JobTable, "report", count)


def errors_of_ranks_are_ignored(patch: Patch) -> None:
    report = JobTable.report

    def forgive(self: JobTable, results: Any) -> list[Job]:
        return report(self, [RankResult(r.rank, r.job_id, None) for r in results])

    patch.setattr(JobTable, "report", forgive)


def workers_say_nothing_of_failures(patch: Patch) -> None:
    take = WorkerSide.take_transfer_results

    def forgive(self: WorkerSide) -> Any:
        return dataclasses.replace(take(self), failed_recving=set())

    patch.setattr(WorkerSide, "take_transfer_results", forgive)


def a_failed_load_is_offered_again(patch: Patch) -> None:
    patch.setattr(SlotPool, "forget", lambda self, content: None)
    end = RequestLoads.on_job_ended

    def forget_failure(self: RequestLoads, job: Job) -> None:
        end(self, job)
        self._failed.clear()

    patch.setattr(RequestLoads, "on_job_ended", forget_failure)


def failures_outlive_their_requests(patch: Patch) -> None:
    def remember(self: RequestLoads, job: Job) -> None:
        if job.error is not None:
            self._failed.add(str(job.request_id))

    patch.setattr(RequestLoads, "on_job_ended", remember)


def submit_may_raise(patch: Patch) -> None:
    def submit(self: WorkerSide, metadata: Any, direction: Any) -> None:
        for job in metadata.jobs:
            if job.direction is direction:
                try:
                    self.engine.submit(job)
                except RuntimeError as error:
                    raise AssertionError("a worker died") from error

    patch.setattr(WorkerSide, "_submit", submit)


def a_load_is_also_failed(patch: Patch) -> None:
    def assign(self: SchedulerSide, request: Any, blocks: Any, num: int) -> None:
        if self.tier is not None and num:
            self.tier.start_load(request, blocks.get_block_ids(), num)
            if self.tier.is_abandoned:
                self.tier._loads._waiting.clear()
                self.tier.fail_load(request.request_id)

    patch.setattr(SchedulerSide, "on_blocks_assigned", assign)


def loads_under_way_are_not_known(patch: Patch) -> None:
    class Forgetful(dict[Any, Any]):
        def setdefault(self, key: Any, default: Any = None) -> Any:
            return default

    init = JobTable.__init__

    def forget(self: JobTable, num_ranks: int) -> None:
        init(self, num_ranks)
        self.loading = Forgetful()

    patch.setattr(JobTable, "__init__", forget)


def a_reset_leaves_the_generation(patch: Patch) -> None:
    reset = HostTier.reset

    def reset_and_restore(self: HostTier) -> None:
        reset(self)
        self.state.generation -= 1

    patch.setattr(HostTier, "reset", reset_and_restore)


def a_reset_leaves_the_slots(patch: Patch) -> None:
    patch.setattr(SlotPool, "clear", lambda self: None)


def a_reset_reaches_no_connector(patch: Patch) -> None:
    patch.setattr(SAMConnector, "reset_cache", lambda self: None)


def tokens_in_flight_count_as_computed(patch: Patch) -> None:
    def computed(self: ChainReader, request: Any, block_ids: Any) -> Any:
        return self._chains(request, block_ids, request.num_tokens)

    patch.setattr(ChainReader, "computed", computed)
    patch.setattr(GpuCache, "holds", lambda self, block, content: True)


def the_last_token_may_be_claimed(patch: Patch) -> None:
    ask = RequestLoads.num_new_matched_tokens

    class OneMore:
        def __init__(self, request: Any) -> None:
            self._request = request

        def __getattr__(self, name: str) -> Any:
            value = getattr(self._request, name)
            return value + 1 if name == "num_tokens" else value

    patch.setattr(
        RequestLoads,
        "num_new_matched_tokens",
        lambda self, request, num: ask(self, cast("Any", OneMore(request)), num),
    )


def a_look_up_pins_what_it_finds(patch: Patch) -> None:
    ask = RequestLoads.num_new_matched_tokens

    def pin(self: RequestLoads, request: Any, num_computed: int) -> Any:
        found = ask(self, request, num_computed)
        hashes = self._chains.hashes(request, next(iter(self._chains.block_sizes)))
        names = [(GroupId(0), h) for h in hashes[: (found or 0) // 16]]
        slots = [self._state.slots.get(name) for name in names]
        self._state.slots.pin([slot for slot in slots if slot is not None])
        return found

    patch.setattr(RequestLoads, "num_new_matched_tokens", pin)


def nobody_knows_of_copies_under_way(patch: Patch) -> None:
    patch.setattr(SAMConnector, "has_pending_push_work", lambda self: False)


# --- what must then fail --------------------------------------------------------------


def case(remove_guard: Mutant, test: Callable[..., object], *args: object) -> Any:
    return pytest.param(
        remove_guard,
        functools.partial(test, *args),
        id=f"{remove_guard.__name__}-{test.__name__.split('_')[1]}",
    )


CASES = [
    case(
        the_last_token_may_be_claimed,
        hits.test_a01_a_claim_leaves_a_token_to_compute,
        KVShape(),
        0,
    ),
    case(
        a_look_up_pins_what_it_finds,
        hits.test_a07_asked_fifty_times_one_load,
        "sync",
    ),
    case(
        a_look_up_pins_what_it_finds,
        hits.test_e12_a_look_up_that_is_followed_by_no_load_holds_nothing,
    ),
    case(
        a_failed_load_is_offered_again,
        failures.test_c03_an_idle_engine_goes_on_when_a_load_fails,
        "one",
    ),
    case(
        workers_say_nothing_of_failures,
        failures.test_c04_requests_that_share_what_fails_to_load,
        "tp2",
        1,
    ),
    case(
        a_load_is_also_failed,
        aborts.test_e06_a_load_is_reported_once_though_hints_went_off,
        "sync",
    ),
    case(
        failures_outlive_their_requests,
        aborts.test_e10_nothing_is_remembered_of_who_left_before_the_failure,
        "sync",
    ),
    case(
        content_is_offered_while_it_is_saved,
        preemption.test_f01_what_is_still_being_saved_is_no_hit,
    ),
    case(
        copies_do_not_hold_blocks,
        copies.test_g03_blocks_are_not_reused_while_they_are_saved,
        "sync",
    ),
    case(
        copies_do_not_hold_blocks,
        copies.test_g04_a_store_under_way_keeps_its_blocks_from_everybody,
    ),
    case(
        errors_of_ranks_are_ignored,
        failures.test_g07_a_policy_save_that_fails_is_not_there,
    ),
    case(
        errors_of_ranks_are_ignored,
        failures.test_i01_a_hit_is_what_every_rank_has,
        3,
    ),
    case(
        loads_do_not_hold_slots,
        copies.test_g09_a_slot_is_not_given_up_while_it_is_loaded,
        "sync",
    ),
    case(
        one_rank_speaks_for_all,
        copies.test_g13_the_engine_lets_go_once_every_rank_has_saved,
        "tp2",
    ),
    case(
        one_rank_speaks_for_all,
        copies.test_g18_completed_means_that_all_of_it_can_be_read,
    ),
    case(
        loads_under_way_are_not_known,
        copies.test_g15_ten_sessions_prefetch_one_prefix_at_once,
        "sync",
        "well",
    ),
    case(
        loads_under_way_are_not_known,
        copies.test_g15_ten_requests_of_one_prefix_load_it_once,
        "well",
        "sync",
    ),
    case(
        a_rank_is_counted_each_time_it_reports,
        failures.test_i04_a_job_is_over_once_every_rank_has_said_so,
    ),
    case(
        tokens_in_flight_count_as_computed,
        preemption.test_k06_nothing_sampled_and_not_computed_is_saved,
    ),
    case(
        a_reset_leaves_the_slots,
        resets.test_o01_nothing_of_old_weights_is_served,
        "all",
        "sync",
    ),
    case(
        a_reset_reaches_no_connector,
        resets.test_o01_nothing_of_old_weights_is_served,
        "all",
        "sync",
    ),
    case(
        a_reset_leaves_the_generation,
        resets.test_o04_a_store_that_ends_after_the_reset_brings_no_key_back,
        "sync",
    ),
    case(
        nobody_knows_of_copies_under_way,
        resets.test_o07_the_engine_knows_that_copies_are_under_way,
        "save",
    ),
]


@pytest.mark.parametrize(("remove_guard", "test"), CASES)
def test_without_its_guard_the_test_fails(
    remove_guard: Mutant, test: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_guard(monkeypatch)
    with pytest.raises(AssertionError):
        test()


def test_c07_without_its_guard_a_worker_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    submit_may_raise(monkeypatch)
    with pytest.raises(AssertionError, match="a worker died"):
        failures.test_c07_a_copy_that_cannot_be_submitted_has_failed(1, monkeypatch)
