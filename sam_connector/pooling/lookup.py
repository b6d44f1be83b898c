"""What is in the store, as far as it has been asked lately."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sam_connector.pooling.key_space import Chunk


@dataclass(eq=False, slots=True)
class _Answer:
    """``is_there`` until ``expire_at``; ``None`` while the question is out."""

    is_there: bool | None
    expire_at: float


class ExistenceCache:
    """Answers for requests' look-ups, which must neither wait nor ask twice.

    Not thread-safe.

    Args:
        positive_ttl_s: how long a value that is there is believed to stay.
        negative_ttl_s: how long one that is not is believed not to come.
        deadline_s: how long a look-up is told to ask again; after that what has not
            been answered counts as missing.
        max_entries: answers remembered.
    """

    def __init__(
        self,
        *,
        positive_ttl_s: float,
        negative_ttl_s: float,
        deadline_s: float,
        max_entries: int = 262_144,
    ) -> None:
        self._positive_ttl_s = positive_ttl_s
        self._negative_ttl_s = negative_ttl_s
        self._deadline_s = deadline_s
        self._max_entries = max_entries
        self._answers: dict[Chunk, _Answer] = {}
        self._questions: dict[Chunk, None] = {}
        #: Raised by ``clear``: answers to older questions are void.
        self.generation = 0

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def num_questions(self) -> int:
        return len(self._questions)

    def lookup(
        self, chunks: Sequence[Chunk], now: float, *, can_wait: bool = True
    ) -> list[bool | None]:
        """What is known of ``chunks``; ``None`` while it is being found out.

        What follows a chunk that is missing is not asked for, or not any more.

        Args:
            chunks: of one prefix, in order.
            now: the time.
            can_wait: otherwise what is not known counts as missing at once; it is
                asked for all the same.
        """
        can_wait = can_wait and self._deadline_s > 0
        answers: list[bool | None] = []
        for chunk in chunks:
            known = self._answers.get(chunk)
            if known is None or (known.is_there is not None and now >= known.expire_at):
                self._ask(chunk, now + self._deadline_s if can_wait else now)
                answers.append(None if can_wait else False)
            elif known.is_there is None and now < known.expire_at:
                answers.append(None)
            else:
                answers.append(bool(known.is_there))
                if known.is_there is False:
                    self._withdraw(chunks[len(answers) :])
                if not known.is_there:
                    break
        answers += [False] * (len(chunks) - len(answers))
        return answers

    def take_questions(self, max_chunks: int) -> list[Chunk]:
        """What to ask the store now, oldest first."""
        chunks = list(self._questions)[:max_chunks]
        for chunk in chunks:
            del self._questions[chunk]
        return chunks

    def answer(
        self, chunk: Chunk, is_there: bool | None, now: float, generation: int
    ) -> bool:
        """The store has answered; ``None`` if it could not.

        Returns:
            Whether that is news: an answer to a question of before ``clear``, or about
            what was written or found missing since, is too old.
        """
        known = self._answers.get(chunk)
        if generation != self.generation or known is None or known.is_there is not None:
            return False
        self._set(chunk, bool(is_there), now)
        return True

    def note_there(self, chunks: Iterable[Chunk], now: float) -> None:
        """They were just written, or read."""
        for chunk in chunks:
            self._set(chunk, True, now)

    def note_missing(self, chunks: Iterable[Chunk], now: float) -> None:
        """They were just found not to be there."""
        for chunk in chunks:
            self._set(chunk, False, now)

    def is_there(self, chunk: Chunk, now: float) -> bool:
        """Whether it is known to be there."""
        known = self._answers.get(chunk)
        return known is not None and known.is_there is True and now < known.expire_at

    def was_there_since(self, chunk: Chunk, time_s: float) -> bool:
        """Whether it was written, read or found at ``time_s`` or later."""
        known = self._answers.get(chunk)
        return (
            known is not None
            and known.is_there is True
            and known.expire_at >= time_s + self._positive_ttl_s
        )

    def clear(self) -> None:
        self.generation += 1
        self._answers.clear()
        self._questions.clear()

    def _ask(self, chunk: Chunk, wait_until: float) -> None:
        self._insert(chunk, _Answer(None, wait_until))
        self._questions[chunk] = None

    def _withdraw(self, chunks: Sequence[Chunk]) -> None:
        """Nobody can use them: a block's hash covers all the blocks before it."""
        for chunk in chunks:
            if chunk in self._questions:
                del self._questions[chunk], self._answers[chunk]

    def _set(self, chunk: Chunk, is_there: bool, now: float) -> None:
        ttl_s = self._positive_ttl_s if is_there else self._negative_ttl_s
        self._questions.pop(chunk, None)
        self._insert(chunk, _Answer(is_there, now + ttl_s))

    def _insert(self, chunk: Chunk, answer: _Answer) -> None:
        self._answers.pop(chunk, None)
        self._answers[chunk] = answer
        while len(self._answers) > self._max_entries:
            oldest = next(iter(self._answers))
            del self._answers[oldest]
            self._questions.pop(oldest, None)
