"""What is known of which values are in the store, for requests that cannot wait.

A question is asked in the background; until its answer is there, and only up to a
deadline, "not known yet" is the answer. After that the value counts as missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sam_connector.errors import IntegrityError
from sam_connector.pooling.key_space import Chunk


class Question(NamedTuple):
    """One chunk that somebody waits to hear about.

    Attributes:
        chunk: which.
        number: no other question has it; an answer to a question that is not open any
            more is an answer to nothing.
    """

    chunk: Chunk
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExistenceStats:
    """Attributes: what is remembered and open, and what has been answered, in chunks."""

    num_answers: int
    num_questions: int
    num_hits: int
    num_misses: int
    num_timeouts: int
    num_refused: int
    num_asked: int
    num_void: int


@dataclass(slots=True)
class _Open:
    number: int
    asked_at: float
    is_taken: bool = False


class _Answer(NamedTuple):
    is_there: bool
    expire_at: float


class ExistenceCache:
    """Answers, and questions that are still open.

    Asking changes nothing but what is being asked, however often it is done.

    Args:
        positive_ttl_s: how long a "yes" is believed.
        negative_ttl_s: how long a "no" is.
        deadline_s: how long a question may stay without answer before it counts as
            a "no"; the answer is still taken when it comes.
        max_answers: most that are remembered; the oldest are forgotten.
        max_questions: most that are open; beyond it the answer is "no".
    """

    def __init__(
        self,
        *,
        positive_ttl_s: float = 5.0,
        negative_ttl_s: float = 1.0,
        deadline_s: float = 0.05,
        max_answers: int = 1 << 19,
        max_questions: int = 1 << 16,
    ) -> None:
        self._ttl_s = {True: positive_ttl_s, False: negative_ttl_s}
        self._deadline_s = deadline_s
        self._max_answers = max_answers
        self._max_questions = max_questions
        #: Oldest first.
        self._answers: dict[Chunk, _Answer] = {}
        self._open: dict[Chunk, _Open] = {}
        self._untaken: dict[Chunk, None] = {}
        self._numbers = itertools.count(1)
        #: The store gave no answer last time: nobody waits for it until it does.
        self._is_failing = False
        self._counts = dict.fromkeys(_COUNTS, 0)

    @property
    def has_questions(self) -> bool:
        """Whether ``take_questions`` has any."""
        return bool(self._untaken)

    def lookup(self, chunks: Sequence[Chunk], now: float) -> list[bool | None]:
        """Whether values are there; ``None`` for "ask again"."""
        return [self._lookup(chunk, now) for chunk in chunks]

    def take_questions(self, max_questions: int) -> list[Question]:
        """Takes the oldest questions that nobody has taken; the caller answers them."""
        chunks = list(itertools.islice(self._untaken, max_questions))
        for chunk in chunks:
            del self._untaken[chunk]
            self._open[chunk].is_taken = True
        return [Question(chunk, self._open[chunk].number) for chunk in chunks]

    def answer(self, question: Question, is_there: bool, now: float) -> bool:
        """The store has answered.

        Returns:
            Whether the answer counts. It does not if everything was cleared since, or
            more was heard about the chunk.
        """
        self._is_failing = False
        return self._close(question, is_there, now)

    def answer_failed(self, questions: Iterable[Question], now: float) -> None:
        """The store did not answer: for a while they count as missing."""
        self._is_failing = True
        for question in questions:
            self._close(question, False, now)

    def note_written(self, chunks: Iterable[Chunk], now: float) -> None:
        """They are there, whatever was heard before, or is still to come."""
        for chunk in chunks:
            self._note(chunk, True, now)

    def note_missing(self, chunks: Iterable[Chunk], now: float) -> None:
        """They are not there."""
        for chunk in chunks:
            self._note(chunk, False, now)

    def clear(self) -> None:
        """Forgets all answers; those to questions that are open count no more."""
        self._answers.clear()
        self._open.clear()
        self._untaken.clear()

    def stats(self) -> ExistenceStats:
        return ExistenceStats(
            num_answers=len(self._answers),
            num_questions=len(self._open),
            **self._counts,
        )

    def _lookup(self, chunk: Chunk, now: float) -> bool | None:
        answer = self._answers.get(chunk)
        if answer is not None and now < answer.expire_at:
            self._counts["num_hits" if answer.is_there else "num_misses"] += 1
            return answer.is_there
        question = self._open.get(chunk)
        if question is None:
            if len(self._open) >= self._max_questions:
                self._counts["num_refused"] += 1
                return False
            question = _Open(next(self._numbers), now)
            self._open[chunk] = question
            self._untaken[chunk] = None
            self._counts["num_asked"] += 1
        if self._is_failing or now - question.asked_at >= self._deadline_s:
            self._counts["num_timeouts"] += 1
            return False
        return None

    def _close(self, question: Question, is_there: bool, now: float) -> bool:
        known = self._open.get(question.chunk)
        if known is None or known.number != question.number:
            self._counts["num_void"] += 1
            return False
        self._note(question.chunk, is_there, now)
        return True

    def _note(self, chunk: Chunk, is_there: bool, now: float) -> None:
        self._open.pop(chunk, None)
        self._untaken.pop(chunk, None)
        self._answers.pop(chunk, None)
        self._answers[chunk] = _Answer(is_there, now + self._ttl_s[is_there])
        if len(self._answers) > self._max_answers:
            del self._answers[next(iter(self._answers))]

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` if a question is lost or a bound is exceeded."""
        untaken = {chunk for chunk, q in self._open.items() if not q.is_taken}
        if untaken != set(self._untaken):
            raise IntegrityError(f"questions lost: {untaken ^ set(self._untaken)}")
        if len(self._answers) > self._max_answers:
            raise IntegrityError(f"{len(self._answers)} answers")
        if len(self._open) > self._max_questions:
            raise IntegrityError(f"{len(self._open)} questions")


_COUNTS = (
    "num_hits",
    "num_misses",
    "num_timeouts",
    "num_refused",
    "num_asked",
    "num_void",
)
