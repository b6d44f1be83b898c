from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("vllm")

from benchmarks.core_ops.index import IndexSubject
from benchmarks.core_ops.measure import SUBJECTS
from benchmarks.core_ops.sessions import SessionsSubject
from benchmarks.core_ops.timing import Batch, Subject
from benchmarks.core_ops.tracker import TrackerSubject
from benchmarks.core_ops.wheel import WheelSubject

pytestmark = pytest.mark.vllm

NUM_ENTRIES = 640


def rounds(subject: Subject, count: int) -> list[Batch]:
    found = []
    for _ in range(count):
        for batch in subject.batches():
            batch.run()
            found.append(batch)
    return found


@pytest.mark.parametrize(("make", "life"), SUBJECTS.values(), ids=SUBJECTS)
def test_every_operation_that_counts_is_measured(
    make: Callable[[int], Subject], life: tuple[str, ...]
) -> None:
    batches = rounds(make(NUM_ENTRIES), 1)
    assert set(life) <= {batch.name for batch in batches}
    assert all(batch.num_ops > 0 for batch in batches)


def test_wheel_keeps_its_timers_and_none_comes_due_by_itself() -> None:
    subject = WheelSubject(NUM_ENTRIES)
    rounds(subject, 3)
    subject._wheel.check_integrity()
    assert len(subject._wheel) == NUM_ENTRIES
    with pytest.raises(RuntimeError, match="0 timers ended instead of 1"):
        subject._tick(1)


def test_sessions_are_as_many_and_as_leased_as_before() -> None:
    subject = SessionsSubject(NUM_ENTRIES)
    assert subject.book.num_contexts == NUM_ENTRIES
    rounds(subject, 3)
    assert len(subject.book.sessions) == subject.book.num_contexts == NUM_ENTRIES
    subject.book.sessions.check_integrity()
    subject.book.leases.check_integrity(
        [context for session in subject.book.sessions for context in session.contexts]
    )


def test_index_holds_the_same_blocks_after_each_round() -> None:
    subject = IndexSubject(NUM_ENTRIES)
    rounds(subject, 3)
    assert subject.index.num_blocks == subject.index.num_records == NUM_ENTRIES
    subject.index.check_integrity([line.context for line in subject._lines])
    subject._pool.adapter.free_queue.check_integrity()
    # All of it is still resident, so that nothing was measured on empty segments.
    assert sum(s.num_resident for s in subject.index.segments()) == NUM_ENTRIES


def test_tracker_has_the_same_chunks_after_each_round() -> None:
    subject = TrackerSubject(NUM_ENTRIES)
    rounds(subject, 3)
    subject._tracker.check_integrity()
    assert subject._tracker.num_chunks == NUM_ENTRIES
