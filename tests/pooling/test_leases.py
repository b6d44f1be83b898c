"""A session is leased for as long as the longest of its contexts."""

from __future__ import annotations

from sam_connector.pooling.leases import SessionLeases
from tests.pooling.bench import session


def test_the_longest_lease_is_the_session_s() -> None:
    leases = SessionLeases()
    assert leases.set(session("s"), 1, 10.0) == 10.0
    assert leases.set(session("s"), 2, 20.0) == 20.0
    assert leases.set(session("s"), 1, 15.0) == 20.0
    assert leases.set(session("s"), 2, 0.0) == 15.0
    assert leases.set(session("s"), 1, 0.0) == 0.0
    assert list(leases) == []


def test_a_lease_that_never_was_may_end() -> None:
    leases = SessionLeases()
    assert leases.set(session("s"), 1, 0.0) == 0.0
    assert list(leases) == []


def test_sessions_are_forgotten_one_by_one_or_all() -> None:
    leases = SessionLeases()
    for name in "stu":
        leases.set(session(name), 1, 10.0)
    leases.forget(session("s"))
    assert list(leases) == [session("t"), session("u")]
    leases.clear()
    assert list(leases) == []
