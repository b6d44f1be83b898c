"""What is refreshed when: all of live leases, once per interval, spread out."""

from __future__ import annotations

from collections import Counter

from sam_connector.pooling.keep_alive import KeepAlive
from sam_connector.pooling.tracker import SessionKeyTracker
from tests.pooling.bench import chunk, chunks, letters, session


def make(**sessions: str) -> tuple[KeepAlive, SessionKeyTracker]:
    """Leased sessions with their chunks; an interval of ten seconds."""
    tracker = SessionKeyTracker()
    keep_alive = KeepAlive(tracker, interval_s=10.0)
    for name, text in sessions.items():
        tracker.add(session(name), chunks(text))
        keep_alive.set_lease(session(name), 1_000.0)
    return keep_alive, tracker


def run(keep_alive: KeepAlive, begin: float, end: float, limit: int = 100) -> str:
    """What is refreshed from one second to another, asked four times a second."""
    found = ""
    now = begin
    while now < end:
        found += letters(keep_alive.due(now, limit))
        now += 0.25
    return found


def test_every_leased_chunk_is_refreshed_once_in_an_interval() -> None:
    keep_alive, _ = make(s="abc", u="def")
    keep_alive.due(0.0, 100)
    for round_ in range(3):
        begin = round_ * 10.25 + 0.25
        found = run(keep_alive, begin, begin + 10.25)
        assert Counter(found) == Counter("abcdef")


def test_shared_chunks_are_refreshed_once() -> None:
    keep_alive, _ = make(s="abx", u="aby", v="ab")
    keep_alive.due(0.0, 100)
    assert Counter(run(keep_alive, 0.25, 10.25)) == Counter("abxy")


def test_the_work_is_spread_over_the_interval() -> None:
    keep_alive, _ = make(**{f"s{i}": chr(65 + i) for i in range(40)})
    keep_alive.due(0.0, 1_000)
    batches = [len(keep_alive.due(0.25 * i, 1_000)) for i in range(1, 41)]
    assert sum(batches) == 40
    assert max(batches) <= 2


def test_what_exceeds_a_batch_stays_due() -> None:
    keep_alive, _ = make(s="abcdefgh")
    keep_alive.due(0.0, 3)
    assert Counter(run(keep_alive, 9.75, 11.0, limit=3)) == Counter("abcdefgh")


def test_a_lease_that_has_ended_is_not_kept_alive() -> None:
    keep_alive, _ = make(s="a", u="b")
    keep_alive.set_lease(session("s"), 5.0)
    keep_alive.due(0.0, 100)
    assert run(keep_alive, 0.25, 30.0).count("a") == 0
    assert len(keep_alive) == 1


def test_a_lease_that_is_given_up_in_the_middle_of_a_round() -> None:
    keep_alive, _ = make(s="a", u="b")
    keep_alive.due(0.0, 100)
    keep_alive.set_lease(session("s"), 0.0)
    assert "a" not in run(keep_alive, 0.25, 30.0)


def test_what_is_orphaned_is_not_kept_alive() -> None:
    keep_alive, tracker = make(s="ab")
    keep_alive.due(0.0, 1)
    tracker.drop_chunks([chunk("a")])
    assert set(run(keep_alive, 0.25, 30.0)) == {"b"}


def test_one_session_s_end_does_not_end_another_s_share() -> None:
    keep_alive, _ = make(s="ab", u="ab")
    keep_alive.set_lease(session("s"), 0.0)
    keep_alive.due(0.0, 100)
    assert Counter(run(keep_alive, 0.25, 10.25)) == Counter("ab")


def test_a_lease_that_comes_later_is_in_the_next_round() -> None:
    keep_alive, tracker = make(s="a")
    keep_alive.due(0.0, 100)
    tracker.add(session("u"), chunks("b"))
    keep_alive.set_lease(session("u"), 1_000.0)
    assert "b" in run(keep_alive, 0.25, 21.0)


def test_after_a_reset_nothing_is_due() -> None:
    keep_alive, _ = make(s="ab")
    keep_alive.due(0.0, 100)
    keep_alive.clear()
    assert run(keep_alive, 0.25, 30.0) == ""


def test_a_round_that_takes_too_long_starves_nobody() -> None:
    """More is leased than can be refreshed in an interval: the last get their turn."""
    keep_alive, _ = make(**{f"s{i}": chr(65 + i) for i in range(50)})
    found = ""
    for second in range(0, 200, 2):
        found += letters(keep_alive.due(float(second), 1))
    assert set(found) == {chr(65 + i) for i in range(50)}


def test_a_lease_that_ends_while_its_chunks_are_due_is_not_refreshed() -> None:
    keep_alive, _ = make(s="abcdef")
    keep_alive.due(0.0, 2)
    assert letters(keep_alive.due(10.0, 2)) == "ab"
    keep_alive.set_lease(session("s"), 0.0)
    assert run(keep_alive, 10.25, 30.0) == ""


def test_every_leased_session_s_manifest_is_due_once_in_an_interval() -> None:
    keep_alive, _ = make(s="ab", u="ab", v="c")
    keep_alive.set_lease(session("bare"), 1_000.0)
    keep_alive.due(0.0, 100)
    for round_ in range(2):
        found = []
        for quarter in range(1, 42):
            now = round_ * 10.25 + 0.25 * quarter
            keep_alive.due(now, 100)
            while (due := keep_alive.next_session(now)) is not None:
                found.append(due.session_id)
        assert Counter(found) == Counter(["s", "u", "v", "bare"])


def test_a_manifest_is_due_only_as_long_as_the_lease_lasts() -> None:
    keep_alive, _ = make(s="a", u="b")
    keep_alive.due(0.0, 100)
    keep_alive.due(10.0, 100)
    keep_alive.set_lease(session("s"), 0.0)
    assert keep_alive.next_session(10.0) == session("u")
    assert keep_alive.next_session(10.0) is None
