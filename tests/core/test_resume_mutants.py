"""What ``test_manager_resumes`` relies on is needed: without it a test there fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sam_connector.core.block_index import BlockIndex
from sam_connector.core.claim import Claim
from sam_connector.core.contexts import ContextBook
from sam_connector.core.expectations import Expectations
from sam_connector.core.manager import SessionAwareManager
from sam_connector.core.retention import Segment
from sam_connector.core.types import Zone
from tests.core import test_expectations, test_manager_resumes, test_zoned_queue

Mutant = tuple[type, str, Any]

#: For each test what it must notice: a class, a name in it, and what that becomes.
MUTANTS: list[tuple[Callable[[], None], Mutant]] = [
    (
        test_manager_resumes.test_overdue_is_the_same_as_not_expected,
        (SessionAwareManager, "_forget_overdue", lambda *args: 0),
    ),
    (
        test_manager_resumes.test_what_is_overdue_is_noticed_before_blocks_are_taken,
        (SessionAwareManager, "_forget_overdue", lambda *args: 0),
    ),
    (
        test_manager_resumes.test_coming_back_ends_the_expectation,
        (ContextBook, "expect_nothing", lambda *args: None),
    ),
    (
        test_manager_resumes.test_what_one_session_says_puts_no_other_behind,
        (
            Segment,
            "due_at",
            property(lambda s: s.expectations.earliest if s.expectations else 1060.0),
        ),
    ),
    (
        test_manager_resumes.test_a_shared_prefix_is_due_with_the_first_of_its_sessions,
        (
            Expectations,
            "earliest",
            property(lambda self: max(self.moments.values(), default=0.0)),
        ),
    ),
    (
        test_manager_resumes.test_a_split_keeps_what_is_expected,
        (Expectations, "copy", lambda self: Expectations()),
    ),
    (
        test_manager_resumes.test_under_leases_who_is_back_latest_goes_first,
        (BlockIndex, "set_resume", lambda *args: None),
    ),
    (
        test_zoned_queue.test_in_b_who_will_be_back_follows_the_others_latest_first,
        (Claim, "is_timed", property(lambda claim: claim.zone is Zone.C)),
    ),
    (
        test_expectations.test_what_has_changed_a_thousand_times_is_no_larger_for_it,
        (Expectations, "_rebuild", lambda self: None),
    ),
]


@pytest.mark.parametrize(
    ("check", "mutant"), MUTANTS, ids=[check.__name__ for check, _ in MUTANTS]
)
def test_without_it_the_test_fails(
    check: Callable[[], None], mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*mutant)
    with pytest.raises(Exception):  # noqa: B017, PT011  (whatever it notices by)
        check()
