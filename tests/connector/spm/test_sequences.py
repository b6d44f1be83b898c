"""Tokens of sessions are remembered within bounds."""

from __future__ import annotations

from sam_connector.connector.spm.sequences import SequenceBook, TokenSequence
from sam_connector.core.types import BlockHash, SessionKey

SIZE = 4


def key(name: str) -> SessionKey:
    return SessionKey("", name)


def sequence(*blocks: int) -> TokenSequence:
    """One block of equal tokens for each number; its hash names all before it."""
    made = TokenSequence(SIZE)
    hashes = [BlockHash(bytes(blocks[: i + 1])) for i in range(len(blocks))]
    made.extend(hashes, [block for block in blocks for _ in range(SIZE)])
    return made


def book(max_tokens: int = 1_000, max_contexts: int = 4) -> SequenceBook:
    return SequenceBook(max_tokens=max_tokens, max_contexts=max_contexts)


def test_a_turn_extends_what_is_known() -> None:
    known = book()
    known.note(key("s"), sequence(1, 2), 2)
    known.note(key("s"), sequence(1, 2, 3), 3)
    (grown,) = known.of(key("s"))
    assert list(grown.tokens) == [1] * SIZE + [2] * SIZE + [3] * SIZE
    assert known.num_tokens == 3 * SIZE
    known.check_integrity()


def test_only_what_was_computed_is_remembered() -> None:
    known = book()
    known.note(key("s"), sequence(1, 2, 3), 2)
    assert len(known.of(key("s"))[0]) == 2
    known.check_integrity()


def test_a_repetition_changes_nothing() -> None:
    known = book()
    known.note(key("s"), sequence(1, 2, 3), 3)
    known.note(key("s"), sequence(1, 2, 3), 2)
    assert [len(s) for s in known.of(key("s"))] == [3]
    known.check_integrity()


def test_a_side_call_is_a_sequence_of_its_own() -> None:
    known = book(max_contexts=2)
    known.note(key("s"), sequence(1, 2), 2)
    known.note(key("s"), sequence(8), 1)
    assert known.find(key("s"), 1, sequence(1).hashes[0]) is known.of(key("s"))[0]
    assert known.find(key("s"), 1, sequence(9).hashes[0]) is None
    known.note(key("s"), sequence(9), 1)
    assert [s.tokens[0] for s in known.of(key("s"))] == [8, 9]
    known.check_integrity()


def test_the_session_used_longest_ago_makes_room() -> None:
    known = book(max_tokens=2 * SIZE)
    assert known.note(key("a"), sequence(1), 1) == []
    known.note(key("b"), sequence(2), 1)
    known.note(key("a"), sequence(1), 1)
    assert known.note(key("c"), sequence(3), 1) == [key("b")]
    assert known.sessions() == [key("a"), key("c")]
    known.check_integrity()


def test_a_session_beyond_all_room_is_not_remembered() -> None:
    known = book(max_tokens=SIZE)
    assert known.note(key("a"), sequence(1, 2), 2) == [key("a")]
    assert known.num_tokens == 0
    known.check_integrity()


def test_remove_and_clear() -> None:
    known = book()
    known.note(key("a"), sequence(1), 1)
    known.note(key("b"), sequence(1), 1)
    known.remove(key("a"))
    known.remove(key("never"))
    assert known.num_tokens == SIZE
    known.clear()
    assert len(known) == known.num_tokens == 0
