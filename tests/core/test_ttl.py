from __future__ import annotations

import math

import pytest

from sam_connector.core.session_index import Context, Session
from sam_connector.core.ttl import LeaseTable, ResumeTable
from sam_connector.errors import IntegrityError
from tests.core.builders import key


def context() -> Context:
    return Context(session=Session(key=key("s")))


def test_a_lease_can_be_extended_and_shortened() -> None:
    leases, leased = LeaseTable(idle_ttl_s=100.0, now=0.0), context()
    leases.grant(leased, 10.0)
    leases.grant(leased, 20.0)
    assert leases.take_expired(15.0, 9) == []
    leases.grant(leased, 17.0)
    assert leases.take_expired(17.0, 9) == [leased]
    assert len(leases) == 0


def test_after_the_lease_the_idle_time_runs() -> None:
    leases, idle = LeaseTable(idle_ttl_s=100.0, now=0.0), context()
    leases.grant(idle, 10.0)
    leases.end(idle, 5.0)
    assert idle.deadline == 0.0
    assert leases.take_expired(104.0, 9) == []
    assert leases.take_expired(105.0, 9) == [idle]


def test_a_forgotten_context_never_fires() -> None:
    leases, gone = LeaseTable(idle_ttl_s=100.0, now=0.0), context()
    leases.grant(gone, 10.0)
    leases.forget(gone)
    leases.forget(gone)
    assert leases.take_expired(1e6, 9) == []


def test_every_context_has_one_entry_however_often_it_is_renewed() -> None:
    leases, renewed = LeaseTable(idle_ttl_s=100.0, now=0.0), context()
    for deadline in range(1, 500):
        leases.grant(renewed, float(deadline))
    assert len(leases) == 1


@pytest.mark.parametrize("deadline", [math.nan, math.inf])
def test_the_wheel_never_receives_what_is_no_time(deadline: float) -> None:
    leases, leased = LeaseTable(idle_ttl_s=100.0, now=0.0), context()
    leases.grant(leased, 10.0)
    with pytest.raises(ValueError, match="finite"):
        leases.grant(leased, deadline)
    assert leased.deadline == 10.0
    assert leases.take_expired(10.0, 9) == [leased]


def test_whoever_listens_hears_of_every_change_of_a_deadline() -> None:
    leases, leased = LeaseTable(idle_ttl_s=100.0, now=0.0), context()
    heard: list[float] = []
    leases.on_change = lambda context: heard.append(context.deadline)
    leases.end(leased, 1.0)
    assert heard == []  # it had no lease
    leases.grant(leased, 10.0)
    leases.grant(leased, 7.0)
    leases.end(leased, 2.0)
    leases.end(leased, 3.0)
    assert heard == [10.0, 7.0, 0.0]


def test_a_context_that_is_forgotten_has_no_lease_to_hear_of() -> None:
    """Who listens hears that it is dropped instead."""
    leases, leased = LeaseTable(idle_ttl_s=100.0, now=0.0), context()
    leases.grant(leased, 10.0)
    heard: list[Context] = []
    leases.on_change = heard.append
    leases.forget(leased)
    assert heard == []
    assert leased.deadline == 0.0


def test_check_integrity_sees_a_context_without_a_timer() -> None:
    leases = LeaseTable(idle_ttl_s=100.0, now=0.0)
    with pytest.raises(IntegrityError):
        leases.check_integrity([context()])


# --- when contexts are expected back ----------------------------------------


def test_an_expectation_passes_at_its_time() -> None:
    resumes, late = ResumeTable(now=0.0), context()
    resumes.expect(late, 10.0, 0.0)
    assert resumes.take_overdue(9.9, 9) == []
    assert resumes.take_overdue(10.0, 9) == [late]
    assert len(resumes) == 0


def test_an_expectation_is_replaced_and_forgotten() -> None:
    resumes, back = ResumeTable(now=0.0), context()
    resumes.expect(back, 10.0, 0.0)
    resumes.expect(back, 20.0, 0.0)
    assert resumes.take_overdue(19.0, 9) == []
    resumes.forget(back)
    assert resumes.take_overdue(1e6, 9) == []


def test_no_more_are_taken_at_a_time_than_asked_for() -> None:
    resumes, late = ResumeTable(now=0.0), [context() for _ in range(5)]
    for each in late:
        resumes.expect(each, 10.0, 0.0)
    taken = [len(resumes.take_overdue(20.0, 2)) for _ in range(4)]
    assert taken == [2, 2, 1, 0]


def test_a_table_that_was_empty_for_long_knows_the_time() -> None:
    """Nobody advances it meanwhile, and nothing expected now is overdue for that."""
    resumes, back = ResumeTable(now=0.0), context()
    resumes.expect(back, 1e6 + 5.0, 1e6)
    assert resumes._wheel._cursor == 1e6
    assert resumes.take_overdue(1e6 + 4.0, 9) == []
    assert resumes.take_overdue(1e6 + 5.0, 9) == [back]


def test_a_context_that_is_forgotten_is_not_expected() -> None:
    leases, gone = LeaseTable(idle_ttl_s=100.0, now=0.0), context()
    leases.grant(gone, 10.0)
    leases.resumes.expect(gone, 5.0, 0.0)
    leases.forget(gone)
    assert len(leases.resumes) == 0


def test_check_integrity_sees_an_expectation_without_a_timer() -> None:
    resumes, back = ResumeTable(now=0.0), context()
    resumes.check_integrity([back])
    back.resume_at = 5.0
    with pytest.raises(IntegrityError):
        resumes.check_integrity([back])
