"""What requests are told of the store, and for how long."""

from __future__ import annotations

from sam_connector.pooling.lookup import ExistenceCache
from tests.pooling.bench import chunk, chunks, letters


def make(deadline_s: float = 0.05, max_entries: int = 100) -> ExistenceCache:
    return ExistenceCache(
        positive_ttl_s=5.0,
        negative_ttl_s=1.0,
        deadline_s=deadline_s,
        max_entries=max_entries,
    )


def answer(cache: ExistenceCache, found: str, now: float) -> None:
    """The store answers all questions."""
    for c in cache.take_questions(100):
        cache.answer(c, letters([c]) in found, now, cache.generation)


def test_it_asks_once_however_often_it_is_asked() -> None:
    cache = make()
    for _ in range(50):
        assert cache.lookup(chunks("ab"), 0.0) == [None, None]
    assert letters(cache.take_questions(100)) == "ab"
    cache.lookup(chunks("ab"), 0.0)
    assert cache.take_questions(100) == []


def test_what_was_answered_is_known_for_a_while() -> None:
    cache = make()
    cache.lookup(chunks("ab"), 0.0)
    answer(cache, "a", 0.01)
    assert cache.lookup(chunks("ab"), 0.9) == [True, False]
    assert cache.lookup(chunks("ab"), 1.1) == [True, None]
    assert cache.lookup(chunks("a"), 5.1) == [None]


def test_what_follows_a_gap_is_not_asked_for() -> None:
    cache = make()
    cache.note_missing(chunks("b"), 0.0)
    assert cache.lookup(chunks("abc"), 0.0) == [None, False, False]
    assert letters(cache.take_questions(100)) == "a"


def test_what_follows_a_gap_that_is_found_is_not_asked_for_any_more() -> None:
    cache = make()
    cache.lookup(chunks("abcd"), 0.0)
    [first] = cache.take_questions(1)
    cache.answer(first, False, 0.01, cache.generation)
    assert cache.lookup(chunks("abcd"), 0.02) == [False] * 4
    assert cache.take_questions(100) == []
    cache.lookup(chunks("b"), 0.02)
    assert letters(cache.take_questions(100)) == "b"


def test_who_cannot_wait_is_told_at_once_and_the_question_is_asked() -> None:
    cache = make()
    cache.lookup(chunks("a"), 0.0)
    assert cache.lookup(chunks("ab"), 0.01, can_wait=False) == [None, False]
    assert cache.lookup(chunks("b"), 0.01) == [False]
    assert letters(cache.take_questions(100)) == "ab"


def test_nobody_waits_longer_than_the_deadline() -> None:
    cache = make()
    cache.lookup(chunks("a"), 0.0)
    cache.take_questions(100)
    assert cache.lookup(chunks("a"), 0.04) == [None]
    assert cache.lookup(chunks("a"), 0.06) == [False]
    assert cache.lookup(chunks("a"), 9.0) == [False]
    cache.answer(chunk("a"), True, 9.0, cache.generation)
    assert cache.lookup(chunks("a"), 9.1) == [True]


def test_without_a_deadline_nobody_waits_at_all() -> None:
    cache = make(deadline_s=0.0)
    assert cache.lookup(chunks("a"), 0.0) == [False]
    answer(cache, "a", 0.1)
    assert cache.lookup(chunks("a"), 0.2) == [True]


def test_h07_what_is_written_is_there_at_once() -> None:
    cache = make()
    cache.lookup(chunks("a"), 0.0)
    answer(cache, "", 0.01)
    assert cache.lookup(chunks("a"), 0.02) == [False]
    cache.note_there(chunks("a"), 0.03)
    assert cache.lookup(chunks("a"), 0.04) == [True]
    assert cache.is_there(chunk("a"), 0.04)


def test_d06_what_is_found_missing_is_not_promised_again() -> None:
    cache = make()
    cache.note_there(chunks("a"), 0.0)
    cache.note_missing(chunks("a"), 0.1)
    assert cache.lookup(chunks("a"), 0.2) == [False]
    assert not cache.is_there(chunk("a"), 0.2)


def test_an_answer_from_before_a_reset_is_void() -> None:
    cache = make()
    cache.lookup(chunks("a"), 0.0)
    [question] = cache.take_questions(100)
    generation = cache.generation
    cache.clear()
    cache.answer(question, True, 0.1, generation)
    assert cache.lookup(chunks("a"), 0.2) == [None]


def test_a_store_that_cannot_say_has_nothing_for_a_moment() -> None:
    cache = make()
    cache.lookup(chunks("a"), 0.0)
    [question] = cache.take_questions(100)
    cache.answer(question, None, 0.1, cache.generation)
    assert cache.lookup(chunks("a"), 0.2) == [False]
    assert cache.lookup(chunks("a"), 1.2) == [None]


def test_memory_is_bounded() -> None:
    cache = make(max_entries=3)
    cache.lookup(chunks("abcdef"), 0.0)
    assert len(cache) == 3
    assert cache.num_questions == 3


def test_h07_an_answer_from_before_the_write_does_not_undo_it() -> None:
    """Asked, then written here, then "no" arrives: it was true when it was said."""
    cache = make()
    cache.lookup(chunks("a"), 0.0)
    [question] = cache.take_questions(100)
    cache.note_there(chunks("a"), 0.01)
    assert not cache.answer(question, False, 0.02, cache.generation)
    assert cache.lookup(chunks("a"), 0.02) == [True]


def test_an_answer_from_before_it_was_found_missing_does_not_undo_that() -> None:
    cache = make()
    cache.lookup(chunks("a"), 0.0)
    [question] = cache.take_questions(100)
    cache.note_missing(chunks("a"), 0.01)
    assert not cache.answer(question, True, 0.02, cache.generation)
    assert cache.lookup(chunks("a"), 0.02) == [False]


def test_what_was_written_meanwhile_is_not_asked() -> None:
    cache = make()
    cache.lookup(chunks("ab"), 0.0)
    cache.note_there(chunks("a"), 0.0)
    assert letters(cache.take_questions(100)) == "b"


def test_it_knows_since_when_something_is_there() -> None:
    cache = make()
    cache.note_there(chunks("a"), 10.0)
    assert cache.was_there_since(chunk("a"), 10.0)
    assert not cache.was_there_since(chunk("a"), 10.1)
    assert not cache.was_there_since(chunk("b"), 0.0)
