"""Which context a request belongs to; the effects are in ``test_manager``."""

from __future__ import annotations

import pytest

from sam_connector.core.contexts import Chain, Chains
from sam_connector.core.limits import Limits
from sam_connector.core.session_index import Context
from tests.core.builders import EVICT, G0, Engine, chain, key


def chains(text: str) -> Chains:
    return {G0: Chain(hashes=chain(text), block_ids=[])}


@pytest.mark.parametrize(
    ("text", "extended", "replaced"),
    [
        ("abcdefgh", "abcdefgh", None),  # the same again
        ("abcdefghij", "abcdefgh", None),  # append-only growth
        ("abcdefg", None, "abcdefgh"),  # truncated
        ("abcdexyz", None, "abcdefgh"),  # diverges after more than half
        ("abcdxyz", None, None),  # after exactly half
        ("pqrs", "pqr", None),
        ("pq", None, "pqr"),
        ("zzz", None, None),
        ("", None, None),
    ],
)
def test_a_request_extends_or_replaces_or_stands_alone(
    text: str, extended: str | None, replaced: str | None
) -> None:
    engine = Engine()
    engine.turn("s", "abcdefgh")
    engine.turn("s", "pqr")
    session = engine.manager.book.sessions.get(key("s"))
    assert session is not None
    by_text = dict(zip(engine.texts("s"), engine.contexts("s"), strict=True))
    found = engine.manager.book.match(session, chains(text))
    assert found == (
        None if extended is None else by_text[extended],
        None if replaced is None else by_text[replaced],
    )


def test_the_longest_context_that_fits_is_extended() -> None:
    engine = Engine()
    engine.turn("s", "abcdefgh")
    engine.turn("s", "abc")
    assert sorted(engine.texts("s")) == ["abc", "abcdefgh"]
    engine.turn("s", "abcdefgh", generated="ij")
    assert sorted(engine.texts("s")) == ["abc", "abcdefghij"]


def test_a_rewind_takes_over_the_lease_with_what_it_covered() -> None:
    engine = Engine(ranges=True)
    engine.turn("s", "abcdefgh", ttl=60, protect=3)
    engine.turn("s", "abcdefxy")
    assert engine.deadlines("s") == {"abcdefxy": 60.0}
    covered = [deadline > 0 for _, deadline in engine.holds("abcdefxy")]
    assert covered == [True] * 3 + [False] * 5


def test_a_rewind_with_a_lease_of_its_own_keeps_it() -> None:
    engine = Engine()
    engine.turn("s", "abcdefgh", ttl=60)
    engine.turn("s", "abcdefxy", ttl=5)
    assert engine.deadlines("s") == {"abcdefxy": 5.0}
    assert engine.manager.stats().contexts_superseded == 1


def test_the_context_used_last_is_the_last_in_order() -> None:
    engine = Engine()
    for text in ("ab", "cd", "ef", "ab"):
        engine.turn("s", text)
    assert engine.texts("s") == ["cd", "ef", "ab"]


def test_a_newcomer_as_large_as_the_oldest_lease_takes_its_place() -> None:
    engine = Engine(limits=Limits(max_contexts=2))
    engine.turn("s", "abc", ttl=60)
    engine.turn("s", "defg", ttl=60)
    engine.turn("s", "xyz", ttl=60)
    assert engine.texts("s") == ["defg", "xyz"]


def test_records_that_do_not_fit_are_not_kept_and_harm_nobody() -> None:
    engine = Engine(limits=Limits(max_records=5))
    running = engine.start("busy", "abc")
    engine.turn("s", "uvwxyz", ttl=60)
    assert engine.texts("busy") == ["abc"]
    assert engine.ref_cnts("uvwxyz") == [0] * 6
    engine.check_integrity()
    engine.finish(running)


def test_dropping_a_session_takes_the_records_of_all_its_contexts() -> None:
    engine = Engine()
    engine.turn("s", "abc")
    engine.turn("s", "xy")
    session = engine.manager.book.sessions.get(key("s"))
    assert session is not None
    assert engine.manager.stats().records == 5
    engine.manager.book.drop_session(session)
    assert engine.manager.stats().records == 0
    engine.assert_nothing_left()


def test_whoever_listens_hears_of_every_context_that_is_dropped() -> None:
    engine = Engine(limits=Limits(max_contexts=2, idle_ttl_s=100.0))
    dropped: list[int] = []
    names: dict[int, str] = {}

    def drop(context: Context) -> None:
        # It is out of the books by now, but still says whose it was.
        assert context not in context.session.contexts
        dropped.append(context.context_id)

    def turn(session: str, text: str) -> None:
        engine.turn(session, text)
        for known, context in zip(
            engine.texts(session), engine.contexts(session), strict=True
        ):
            names[context.context_id] = known

    engine.manager.book.on_dropped = drop
    turn("s", "abcd")
    turn("s", "abcxyz")  # takes the place of "abcd"
    turn("s", "pq")
    turn("s", "mn")  # a third: the oldest goes
    assert [names[c] for c in dropped] == ["abcd", "abcxyz"]
    engine.edit("s", EVICT)
    turn("t", "k")
    engine.step(500)
    engine.settle()
    assert [names[c] for c in dropped[2:]] == ["pq", "mn", "k"]
    turn("u", "z")
    engine.reset()
    assert len(dropped) == len(set(dropped)) == 6
