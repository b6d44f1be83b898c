"""Sessions and their chunks, both ways."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sam_connector.core.types import SessionKey
from sam_connector.pooling.tracker import SessionKeyTracker
from tests.pooling.bench import chunk, chunks, letters, session


def test_a_session_has_what_was_added_in_its_order() -> None:
    tracker = SessionKeyTracker()
    tracker.add(session("s"), chunks("ab"))
    tracker.add(session("s"), chunks("bc"))
    assert letters(tracker.chunks_of(session("s"))) == "abc"
    assert tracker.num_chunks_of(session("s")) == 3
    assert session("s") in tracker


def test_what_nobody_has_any_more_is_orphaned() -> None:
    tracker = SessionKeyTracker()
    tracker.add(session("s"), chunks("abc"))
    tracker.add(session("u"), chunks("ab"))
    assert tracker.num_shared == 2
    assert letters(tracker.remove(session("s"))) == "c"
    assert tracker.num_shared == 0
    assert tracker.num_orphaned == 1
    assert letters(tracker.remove(session("u"))) == "ab"
    assert not tracker.is_known(chunk("a"))


def test_what_is_not_in_the_store_belongs_to_nobody() -> None:
    tracker = SessionKeyTracker()
    tracker.add(session("s"), chunks("ab"))
    tracker.add(session("u"), chunks("ab"))
    tracker.drop_chunks(chunks("ax"))
    assert letters(tracker.chunks_of(session("s"))) == "b"
    assert letters(tracker.chunks_of(session("u"))) == "b"
    tracker.check_integrity()


def test_what_a_session_does_not_name_any_more_is_not_its() -> None:
    tracker = SessionKeyTracker()
    tracker.add(session("s"), chunks("abc"))
    tracker.add(session("u"), chunks("b"))
    tracker.retain(session("s"), set(chunks("cd")))
    tracker.retain(session("v"), set(chunks("a")))
    assert letters(tracker.chunks_of(session("s"))) == "c"
    assert letters(tracker.chunks_of(session("u"))) == "b"
    assert not tracker.is_known(chunk("a"))
    tracker.check_integrity()
    tracker.retain(session("s"), ())
    assert session("s") not in tracker
    tracker.check_integrity()


def test_what_very_many_share_is_gone_at_once_and_tidied_up_later() -> None:
    tracker = SessionKeyTracker()
    sessions = [session(str(n)) for n in range(3_000)]
    for name in sessions:
        tracker.add(name, chunks("ab"))
    tracker.drop_chunks(chunks("a"))

    assert tracker.num_sessions(chunk("a")) == 0
    assert tracker.num_chunks == tracker.num_shared == 1
    assert {letters(tracker.chunks_of(name)) for name in sessions} == {"b"}
    tracker.check_integrity()
    # Written again, before its first loss was made up for.
    tracker.add(sessions[0], chunks("a"))
    tracker.add(sessions[-1], chunks("a"))
    tracker.remove(sessions[-1])
    num_tidied = 1
    while tracker.tidy():
        num_tidied += 1
        tracker.check_integrity()
    assert num_tidied > 1
    assert set(letters(tracker.chunks_of(sessions[0]))) == {"a", "b"}
    assert {letters(tracker.chunks_of(name)) for name in sessions[1:-1]} == {"b"}
    tracker.check_integrity()


def test_the_tail_behind_the_longest_shared_prefix() -> None:
    tracker = SessionKeyTracker()
    tracker.add(session("s"), chunks("abcd"))
    tracker.add(session("u"), chunks("ab"))
    assert letters(tracker.unshared_tail(session("s"), chunks("abcd"))) == "cd"
    assert letters(tracker.unshared_tail(session("u"), chunks("ab"))) == ""
    tracker.remove(session("u"))
    assert letters(tracker.unshared_tail(session("s"), chunks("abcd"))) == "abcd"


def test_who_was_added_to_least_recently_is_forgotten() -> None:
    tracker = SessionKeyTracker(max_entries=4)
    tracker.add(session("a"), chunks("ab"))
    tracker.add(session("b"), chunks("cd"))
    tracker.add(session("a"), chunks("a"))
    assert tracker.add(session("c"), chunks("ef")) == [session("b")]
    assert session("b") not in tracker
    tracker.check_integrity()


def test_one_session_that_is_too_large_stays() -> None:
    tracker = SessionKeyTracker(max_entries=2)
    assert tracker.add(session("a"), chunks("abcd")) == []
    assert tracker.num_chunks == 4


NAMES = st.sampled_from("stuv")
TEXTS = st.text("abcdef", max_size=6)


class AgainstSets(RuleBasedStateMachine):
    """A dictionary of sets is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = SessionKeyTracker()
        self.model: dict[SessionKey, set[str]] = {}

    @rule(name=NAMES, text=TEXTS)
    def add(self, name: str, text: str) -> None:
        self.tracker.add(session(name), chunks(text))
        self.model.setdefault(session(name), set()).update(text)

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        gone = self.model.pop(session(name), set())
        others = set().union(*self.model.values()) if self.model else set()
        assert set(letters(self.tracker.remove(session(name)))) == gone - others

    @rule(name=NAMES, text=TEXTS)
    def retain(self, name: str, text: str) -> None:
        self.tracker.retain(session(name), set(chunks(text)))
        self.model.setdefault(session(name), set()).intersection_update(text)

    @rule(text=TEXTS)
    def drop(self, text: str) -> None:
        self.tracker.drop_chunks(chunks(text))
        for known in self.model.values():
            known.difference_update(text)

    @invariant()
    def they_agree(self) -> None:
        self.tracker.check_integrity()
        for name, known in self.model.items():
            assert set(letters(self.tracker.chunks_of(name))) == known
        holders = [sum(c in known for known in self.model.values()) for c in "abcdef"]
        assert self.tracker.num_shared == sum(count > 1 for count in holders)
        for letter, count in zip("abcdef", holders, strict=True):
            assert self.tracker.num_sessions(chunk(letter)) == count


AgainstSets.TestCase.settings = settings(max_examples=50, deadline=None)
TestAgainstSets = AgainstSets.TestCase


def test_a_session_without_chunks_is_not_remembered() -> None:
    """Or an emptied store would leave a name behind for every session there was."""
    tracker = SessionKeyTracker()
    tracker.add(session("s"), chunks("ab"))
    tracker.add(session("u"), [])
    tracker.drop_chunks(chunks("ab"))
    assert tracker.num_sessions_known == 0
    assert session("s") not in tracker
    tracker.check_integrity()


def test_a_gap_in_what_another_has_does_not_make_its_prefix_purgeable() -> None:
    """The other has lost a chunk of the prefix; it may be written again."""
    tracker = SessionKeyTracker()
    tracker.add(session("s"), chunks("abc"))
    tracker.add(session("u"), chunks("b"))
    assert letters(tracker.unshared_tail(session("s"), chunks("abc"))) == "c"
