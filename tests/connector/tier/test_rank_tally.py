"""A job has ended once every rank has said so, each once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from sam_connector.connector.tier.rank_tally import RankTally


@dataclass(eq=False)
class Job:
    ranks: set[int] = field(default_factory=set)
    heard: list[str] = field(default_factory=list)


class Result(NamedTuple):
    rank: int
    job_id: int
    text: str = ""


def hear(job: Job, result: Result) -> None:
    job.heard.append(result.text)


def make(*job_ids: int, num_ranks: int = 2) -> RankTally[Job]:
    tally: RankTally[Job] = RankTally(num_ranks)
    tally.jobs.update({job_id: Job() for job_id in job_ids})
    return tally


def test_the_last_rank_ends_it() -> None:
    tally = make(1, 2)
    first = tally.jobs[1]
    assert tally.report([Result(0, 1, "a"), Result(0, 2)], hear) == []
    assert tally.report([Result(1, 1, "b")], hear) == [first]
    assert first.heard == ["a", "b"]
    assert list(tally.jobs) == [2]


def test_a_rank_that_repeats_itself_counts_once() -> None:
    tally = make(1)
    assert tally.report([Result(0, 1), Result(0, 1)], hear) == []
    assert tally.num_late == 1


def test_a_job_that_nobody_knows_is_late() -> None:
    tally = make()
    assert tally.report([Result(0, 7)], hear) == []
    assert tally.num_late == 1


def test_jobs_end_in_their_order_whatever_the_order_of_reports() -> None:
    tally = make(1, 2, num_ranks=1)
    jobs = list(tally.jobs.values())
    assert tally.report({Result(0, 2), Result(0, 1)}, hear) == jobs


def test_ids_are_new() -> None:
    tally = make()
    assert len({tally.new_id() for _ in range(3)}) == 3
