"""Each guard against a race is needed: without it the race's own test fails.

A mutant takes one guard away; the test named next to it passes with the guard (it is
run as a test of its own) and must fail without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from sam_connector.core import block_index, timer_wheel
from sam_connector.core.block_index import BlockIndex
from sam_connector.core.contexts import ContextBook
from sam_connector.core.edits import EditController
from sam_connector.core.manager import SessionAwareManager
from sam_connector.core.operations import OperationTable
from sam_connector.core.retention import BlockMetaUpdate, Retention, Segment
from sam_connector.core.session_index import Context, Session
from sam_connector.core.session_tree import SessionTree
from sam_connector.core.timer_wheel import TimerWheel
from sam_connector.core.ttl import LeaseTable
from sam_connector.core.types import EditResult, EditStatus, EditType
from sam_connector.core.zoned_queue import ZonedFreeQueue
from tests.core import (
    test_edits,
    test_known_faults,
    test_known_timer_faults,
    test_limits,
    test_manager,
    test_manager_leases,
    test_retention,
    test_session_tree,
)
from tests.core.pool import FakePool

_RESULT = EditResult(type=EditType.OFFLOAD, status=EditStatus.ACCEPTED)

Mutate = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[], Any]

_MUTANTS: list[Any] = []


def mutant(*checks: Check) -> Callable[[Mutate], Mutate]:
    """Registers a mutation together with the tests that must notice it."""

    def register(mutate: Mutate) -> Mutate:
        _MUTANTS.extend(
            pytest.param(mutate, check, id=f"{mutate.__name__}-{check.__name__}")
            for check in checks
        )
        return mutate

    return register


# --- the content of a block -------------------------------------------------


@mutant(
    test_known_faults.test_m06_a_request_with_other_content_in_its_blocks_claims_none_of_them,
    test_retention.test_only_a_block_that_holds_the_content_becomes_its_copy,
)
def holds_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePool, "holds", lambda *args: True)


@mutant(test_retention.test_the_null_block_and_foreign_ids_are_refused)
def null_block_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(
        self: FakePool, block_id: int, expected: Any, group_id: int, claim: Any
    ) -> BlockMetaUpdate:
        self.free_queue.claim(self.blocks[block_id % len(self.blocks)], claim)
        return BlockMetaUpdate.UPDATED

    monkeypatch.setattr(FakePool, "_update_one", update)


@mutant(
    test_known_faults.test_m06_a_block_that_a_stranger_was_given_is_under_no_claim,
    test_manager_leases.test_what_was_broken_is_protected_again_when_it_is_used_again,
)
def reassignment_is_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pop = ZonedFreeQueue._pop_from_run

    def pop_silently(self: ZonedFreeQueue, max_blocks: int) -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(self, "on_reassigned", lambda *args: None)
            return pop(self, max_blocks)

    monkeypatch.setattr(ZonedFreeQueue, "_report_reassigned", lambda *args: None)
    monkeypatch.setattr(ZonedFreeQueue, "_pop_from_run", pop_silently)


@mutant(
    test_retention.test_content_lost_behind_our_back_is_forgotten_when_the_block_is_freed
)
def lost_content_is_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepend_n(self: ZonedFreeQueue, blocks: list[Any]) -> None:
        self._link_all(self.fake_free_list_head.next_free_block, blocks)
        self.num_free_blocks += len(blocks)

    monkeypatch.setattr(ZonedFreeQueue, "prepend_n", prepend_n)


# --- who may say what a session's context is --------------------------------


@mutant(
    test_manager.test_a_late_completion_of_an_older_request_overwrites_nothing,
)
def any_request_owns_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SessionAwareManager,
        "_owns",
        lambda self, record, context: self._may_record(record) and context.is_live,
    )


@mutant(
    test_manager.test_evict_while_a_request_runs_restores_nothing_afterwards,
    test_manager.test_an_evicted_request_that_is_preempted_and_resumed_restores_nothing,
)
def epoch_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SessionAwareManager,
        "_may_record",
        lambda self, record: (
            self.book.sessions.get(record.session.key) is record.session
        ),
    )


@mutant(
    test_manager.test_a_request_of_a_freed_session_records_nothing,
    test_manager.test_evict_while_a_request_runs_restores_nothing_afterwards,
)
def any_request_may_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionAwareManager, "_may_record", lambda *args: True)


@mutant(test_manager.test_a_request_of_a_freed_session_does_not_touch_its_namesake)
def namesakes_are_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_if_empty(self: ContextBook, session: Session) -> None:
        if not session.contexts and not session.num_active:
            self.drop_session(session)

    monkeypatch.setattr(ContextBook, "drop_if_empty", drop_if_empty)


@mutant(
    test_manager.test_an_older_rewind_does_not_replace_what_a_newer_request_extended,
    test_manager.test_a_context_with_a_running_request_is_not_replaced,
)
def a_rewind_always_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = SessionAwareManager._settle

    def replace(
        self: SessionAwareManager, record: Any, context: Context, now: float
    ) -> None:
        if record.replaced is not None and record.replaced.is_live:
            self.book.supersede(record.replaced, context)
            record.replaced = None
        settle(self, record, context, now)

    monkeypatch.setattr(SessionAwareManager, "_settle", replace)


@mutant(
    test_manager.test_a_small_side_call_is_not_recorded_if_only_larger_leases_could_go,
    test_manager.test_a_context_in_use_is_never_released_for_a_newer_one,
)
def any_context_is_expendable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ContextBook,
        "_oldest_expendable",
        lambda self, session, size: session.contexts[0],
    )


@mutant(test_known_faults.test_p09_two_requests_with_one_id_leave_no_count_behind)
def a_second_request_with_the_id_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    add = SessionAwareManager.on_request_added

    def add_anyway(self: SessionAwareManager, request_id: str, hint: Any) -> None:
        self._requests.pop(request_id, None)
        add(self, request_id, hint)

    monkeypatch.setattr(SessionAwareManager, "on_request_added", add_anyway)


@mutant(test_session_tree.test_a_tree_built_from_its_leaves_can_be_walked_however_deep)
def cycles_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def link(self: SessionTree, child: Any, parent: Any) -> bool:
        self._parent_of[child] = parent
        self._children_of.setdefault(parent, {})[child] = None
        return True

    monkeypatch.setattr(SessionTree, "link", link)


# --- blocks in use, and of others -------------------------------------------


@mutant(test_manager.test_evict_touches_no_block_in_use)
def users_of_a_block_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def reuse_when_freed(
        self: FakePool, block_ids: Sequence[int], *, num_own_users: int
    ) -> None:
        for block_id in block_ids:
            self.free_queue.reuse_when_freed([self.blocks[block_id]])

    monkeypatch.setattr(FakePool, "reuse_when_freed", reuse_when_freed)


@mutant(
    test_known_faults.test_m04_ending_a_claim_twice_in_a_row_inserts_nothing_twice,
    test_manager.test_evict_while_a_request_runs_restores_nothing_afterwards,
)
def blocks_in_use_are_put_on_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ZonedFreeQueue,
        "reuse_when_freed",
        lambda self, blocks: self.prepend_n(blocks),
    )


@mutant(
    test_manager_leases.test_an_expiry_never_shortens_another_sessions_deadline,
    test_known_faults.test_l09_a_session_that_ends_releases_its_own_claims_only,
)
def a_deadline_is_the_last_one_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_deadline(
        self: BlockIndex,
        segment: Segment,
        holder: Any,
        deadline: float,
        joining: bool = False,
    ) -> None:
        if joining or holder in segment.deadlines:
            segment.deadlines[holder] = segment.expire_at = deadline
            self._retention.refresh(segment)

    monkeypatch.setattr(BlockIndex, "_set_deadline", set_deadline)


@mutant(
    test_edits.test_a_context_is_remembered_after_its_tail_was_given_up,
    test_edits.test_what_one_session_remembers_is_not_mixed_with_what_another_appends,
    test_edits.test_a_range_given_up_is_no_business_of_a_later_lease,
)
def remembered_segments_are_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    def prune(self: BlockIndex, segment: Segment) -> None:
        node: Segment | None = segment
        while node is not None and not (node.deadlines or node.children):
            if node.parent is None:
                self._roots.pop((node.group_id, node.hashes[0]), None)
            else:
                node.parent.children.pop(node.hashes[0], None)
            node = node.parent

    monkeypatch.setattr(BlockIndex, "_prune", prune)


# --- bounds and pressure ----------------------------------------------------


@mutant(
    test_limits.test_limit_max_protected_fraction,
    test_limits.test_limit_max_protected_fraction_with_blocks_released_in_between,
)
def there_is_always_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retention, "has_room", lambda *args: True)


@mutant(
    test_manager_leases.test_running_requests_do_not_use_up_the_protected_share,
    test_manager_leases.test_of_two_requests_of_a_context_only_the_last_decides,
    test_manager_leases.test_room_that_is_made_before_the_last_request_ends_counts,
    test_manager_leases.test_a_rewind_takes_the_place_of_what_it_replaces_in_the_share_too,
)
def running_contexts_count_towards_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def lease(
        self: ContextBook,
        context: Context,
        deadline: float,
        protect_blocks: int | None,
    ) -> bool:
        if not self._has_room(context, protect_blocks):
            return False
        self.leases.grant(context, deadline)
        context.protect_blocks = protect_blocks
        self._apply_deadline(context)
        self.sessions.touch(context.session)
        return True

    monkeypatch.setattr(block_index, "_rests", lambda holder, deadline: bool(deadline))
    monkeypatch.setattr(
        BlockIndex,
        "set_active",
        lambda self, holder, num_active: setattr(holder, "num_active", num_active),
    )
    monkeypatch.setattr(ContextBook, "lease", lease)


@mutant(
    test_manager_leases.test_of_two_requests_of_a_context_only_the_last_decides,
    test_manager_leases.test_the_last_request_decides_for_a_context_it_does_not_own,
    test_manager_leases.test_a_lease_put_on_a_session_that_runs_is_checked_when_it_comes_to_rest,
)
def coming_to_rest_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def remove_active(self: ContextBook, context: Context, now: float) -> bool:
        self.index.set_active(context, context.num_active - 1)
        return True

    monkeypatch.setattr(ContextBook, "remove_active", remove_active)


@mutant(
    test_manager_leases.test_of_two_requests_of_a_context_only_the_last_decides,
    test_manager_leases.test_the_last_request_decides_for_a_context_it_does_not_own,
)
def any_request_that_ends_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def remove_active(self: ContextBook, context: Context, now: float) -> bool:
        fits = not context.deadline or self._has_room(context, context.protect_blocks)
        if not fits:
            self.end_lease(context, now)
        self.index.set_active(context, context.num_active - 1)
        return fits

    monkeypatch.setattr(ContextBook, "remove_active", remove_active)


@mutant(
    test_manager_leases.test_a_context_that_grew_without_a_lease_needs_room_for_its_prefix_only,
)
def a_segment_counts_beyond_the_blocks_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    num_unprotected = BlockIndex.num_unprotected
    monkeypatch.setattr(
        BlockIndex,
        "num_unprotected",
        lambda self, holder, group_id, num_blocks=None: num_unprotected(
            self, holder, group_id
        ),
    )


@mutant(
    test_manager_leases.test_a_lease_put_on_a_session_at_rest_is_checked,
    test_limits.test_limit_max_protected_fraction_of_a_lease_renewed_when_all_is_used_up,
)
def a_lease_at_rest_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    has_room = ContextBook._has_room
    monkeypatch.setattr(
        ContextBook,
        "_has_room",
        lambda self, context, protect_blocks: (
            not context.num_active or has_room(self, context, protect_blocks)
        ),
    )


@mutant(
    test_manager_leases.test_an_expired_lease_is_given_up_before_a_live_one_though_nobody_stepped,
    test_manager_leases.test_a_forgotten_session_is_given_up_before_a_held_one,
)
def allocation_does_not_look_at_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionAwareManager, "relieve", lambda *args: None)


@mutant(test_limits.test_limit_max_records_counts_what_is_held_again)
def only_growth_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockIndex, "num_held", BlockIndex.length)


# --- timers -----------------------------------------------------------------


@mutant(
    test_known_timer_faults.test_n06_a_timer_re_armed_while_it_fires_does_not_fire_again_at_once
)
def a_timer_may_be_re_armed_into_the_slot_that_fires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advance = TimerWheel.advance

    def forget_latest(self: TimerWheel[Any], now: float, limit: int) -> list[Any]:
        fired = advance(self, now, limit)
        self._latest = self._cursor
        return fired

    monkeypatch.setattr(TimerWheel, "advance", forget_latest)


@mutant(
    test_known_timer_faults.test_n04_a_deadline_beyond_the_wheel_does_not_fire_early
)
def rounds_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_that_is_there(pairs: Any, limit: int) -> Any:
        frame = pairs.gi_frame.f_locals[".0"]
        return [key for key, _ in frame][:limit]

    monkeypatch.setattr(timer_wheel, "islice", all_that_is_there)


@mutant(test_manager_leases.test_a_running_request_keeps_its_session_known)
def running_contexts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def expire(self: SessionAwareManager, context: Context, now: float) -> None:
        self.book.drop(context)
        self.book.drop_if_empty(context.session)

    monkeypatch.setattr(SessionAwareManager, "_expire", expire)


@mutant(test_manager.test_freeing_a_session_is_no_evict)
def a_forgotten_context_keeps_its_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseTable, "forget", lambda *args: None)


# --- operations that end later ----------------------------------------------


@mutant(test_edits.test_an_offload_gives_up_local_retention_only_once_it_is_completed)
def an_accepted_offload_counts_as_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        EditController,
        "_remember",
        lambda self, operation_id, claims: self._reclaim(_RESULT, claims),
    )


@mutant(
    test_edits.test_a_context_in_use_again_is_not_given_up,
    test_edits.test_the_end_of_an_operation_of_a_forgotten_session_changes_nothing,
)
def an_offload_gives_up_contexts_in_use_or_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reclaim(
        self: EditController, result: EditResult, claims: list[Any]
    ) -> EditResult:
        for context, group_id, start, end in claims:
            if not context.is_live:
                context = (
                    context.session.contexts[0]
                    if context.session.contexts
                    else (next(iter(self._book.sessions)).contexts[0])
                )
            self._book.index.release(
                context, group_id, start=start, end=end, front=True
            )
        return result

    monkeypatch.setattr(EditController, "_reclaim", reclaim)


@mutant(test_edits.test_an_open_operation_keeps_the_manager_from_being_idle)
def open_operations_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OperationTable, "num_open", 0)


@mutant(test_edits.test_an_operation_ends_once)
def an_operation_may_end_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = EditController.complete

    def complete_again(self: EditController, operation_id: str, handle: Any) -> None:
        known = self.operations.get(operation_id)
        if known is not None:
            key, result = known
            reopened = replace(result, status=EditStatus.ACCEPTED)
            self.operations.record(key, reopened)
        complete(self, operation_id, handle)

    monkeypatch.setattr(EditController, "complete", complete_again)


@pytest.mark.parametrize(("mutate", "check"), _MUTANTS)
def test_without_its_guard_a_race_is_lost(
    mutate: Mutate, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    # ``IntegrityError`` is an assertion too.
    with pytest.raises(AssertionError):
        check()
