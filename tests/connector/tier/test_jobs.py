"""A job ends once, when every rank has said so, and fails if one of them did."""

from __future__ import annotations

import itertools
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from sam_connector.connector.metadata import EMPTY_METADATA, RankResult
from sam_connector.connector.tier.jobs import Copy, Job, JobTable
from sam_connector.core.slot_pool import Content, Slot
from sam_connector.core.types import BlockHash, GroupId
from sam_connector.transfer.contract import Direction

pytestmark = pytest.mark.vllm


def content(name: str, group_id: int = 0) -> Content:
    return GroupId(group_id), BlockHash(name.encode())


def copies(names: str, first: int = 1, group_id: int = 0) -> list[Copy]:
    """Block n to slot 10 + n."""
    return [
        Copy(content(name, group_id), SimpleNamespace(block_id=n), Slot(11 + n), n)
        for n, name in enumerate(names, first)
    ]


def start(table: JobTable, names: str = "a", **more: Any) -> Job:
    direction = more.pop("direction", Direction.STORE)
    return table.start(direction, copies(names), generation=0, **more)


def report(table: JobTable, *results: tuple[int, Job, str | None]) -> list[Job]:
    return table.report(RankResult(r, job.job_id, error) for r, job, error in results)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_job_ends_when_the_last_rank_has_reported(order: tuple[int, ...]) -> None:
    table = JobTable(3)
    job = start(table)
    assert report(table, (order[0], job, None)) == []
    assert report(table, (order[1], job, None)) == []
    assert len(table) == 1
    assert report(table, (order[2], job, None)) == [job]
    assert job.error is None
    assert len(table) == table.num_late == 0


def test_ranks_may_report_in_one_step() -> None:
    table = JobTable(2)
    job, other = start(table), start(table, "b")
    assert report(
        table, (0, other, None), (1, job, None), (0, job, None), (1, other, None)
    ) == [job, other]


def test_a_rank_that_repeats_itself_counts_once() -> None:
    table = JobTable(2)
    job = start(table)
    assert report(table, (0, job, None)) == []
    assert report(table, (0, job, None)) == []
    assert (len(table), table.num_late) == (1, 1)
    assert report(table, (1, job, None)) == [job]


def test_a_report_of_a_job_that_is_over_is_counted_and_ignored() -> None:
    table = JobTable(1)
    job = start(table)
    report(table, (0, job, None))
    assert report(table, (0, job, "late")) == []
    assert table.report([RankResult(0, 99, None)]) == []
    assert table.num_late == 2
    assert job.error is None


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}])
def test_one_ranks_failure_fails_the_job_but_all_are_waited_for(
    failing: set[int],
) -> None:
    """The others may still be reading or writing what the job holds."""
    table = JobTable(2)
    job = start(table)
    results = [(rank, job, "no" if rank in failing else None) for rank in range(2)]
    assert report(table, results[0]) == []
    assert report(table, results[1]) == [job]
    assert job.error == f"rank {min(failing)}: no"


@pytest.mark.parametrize(
    ("direction", "attribute", "other"),
    [(Direction.STORE, "storing", "loading"), (Direction.LOAD, "loading", "storing")],
)
def test_what_is_under_way_is_found_until_it_ends(
    direction: Direction, attribute: str, other: str
) -> None:
    table = JobTable(1)
    job = start(table, "ab", direction=direction)
    assert getattr(table, attribute) == {content("a"): job, content("b"): job}
    assert getattr(table, other) == {}
    report(table, (0, job, "failed"))
    assert getattr(table, attribute) == {}


def test_of_two_jobs_of_one_content_the_first_is_found() -> None:
    table = JobTable(1)
    first = start(table, "ab", direction=Direction.LOAD)
    second = start(table, "bc", direction=Direction.LOAD)
    assert table.loading[content("b")] is first
    report(table, (0, second, None))
    assert table.loading == {content("a"): first, content("b"): first}


def test_the_ranks_are_told_once_and_in_order() -> None:
    table = JobTable(1)
    assert table.take_metadata() is EMPTY_METADATA
    first = start(table, "ab")
    second = start(table, "c", direction=Direction.LOAD, request_id="r")
    metadata = table.take_metadata()
    assert [job.job_id for job in metadata.jobs] == [first.job_id, second.job_id]
    assert metadata.request_ids == {second.job_id: "r"}
    (part,) = metadata.jobs[0].parts
    assert (part.group_id, part.block_ids, part.slots) == (0, [1, 2], [11, 12])
    assert metadata.jobs[0].direction is Direction.STORE
    assert table.take_metadata() is EMPTY_METADATA
    assert len(table) == 2


def test_a_job_of_several_groups_has_a_part_for_each() -> None:
    table = JobTable(1)
    mixed = [*copies("ab"), *copies("xy", 5, group_id=1), *copies("c", 3)]
    table.start(Direction.LOAD, mixed, generation=0)
    (job,) = table.take_metadata().jobs
    assert [(p.group_id, p.block_ids, p.slots) for p in job.parts] == [
        (0, [1, 2, 3], [11, 12, 13]),
        (1, [5, 6], [15, 16]),
    ]


def test_what_is_told_stays_as_it_is_on_its_way_to_another_process() -> None:
    table = JobTable(1)
    start(table, "ab", request_id="r", direction=Direction.LOAD)
    metadata = table.take_metadata()
    assert pickle.loads(pickle.dumps(metadata)) == metadata


def test_a_job_without_copies_is_one_that_ranks_refuse() -> None:
    table = JobTable(1)
    table.start(Direction.LOAD, (), generation=0, request_id="r")
    (job,) = table.take_metadata().jobs
    (part,) = job.parts
    assert (part.group_id, len(part.block_ids), len(part.slots)) == (-1, 0, 0)


def test_ids_are_never_used_again() -> None:
    table = JobTable(1)
    seen = set()
    for _ in range(5):
        job = start(table)
        seen.add(job.job_id)
        report(table, (0, job, None))
    assert len(seen) == 5


def test_a_job_lists_its_parts_in_the_order_of_the_sequence() -> None:
    job = start(JobTable(1), "abc")
    assert job.contents == [content("a"), content("b"), content("c")]
    assert [block.block_id for block in job.blocks] == [1, 2, 3]
    assert [slot.index for slot in job.slots] == [11, 12, 13]
