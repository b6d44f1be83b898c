from __future__ import annotations

import pytest

pytest.importorskip("torch")

from sam_connector.transfer import CopyJob, Direction, HostPool, SlotLayout
from sam_connector.transfer.planner import CopyPlanner
from tests.transfer.engine_contract import BAD_JOBS
from tests.transfer.memory import Memory, load, separate, store, two_groups


@pytest.fixture
def planner() -> CopyPlanner:
    memory = Memory(separate([256, 96]))
    return CopyPlanner(memory.groups, memory.layout, memory.pool)


def test_a_plan_says_what_must_be_over_before(planner: CopyPlanner) -> None:
    jobs = [
        (store(10, [1], [1]), 0),
        (store(11, [1], [1]), 0),  # of the same direction: in order anyway
        (load(12, [2], [2]), 0),
        (load(13, [1], [5]), 2),  # the slot is being stored to
        (store(14, [5], [9]), 4),  # the block is being loaded
        (store(15, [7], [2]), 3),  # the slot is being read
        (load(16, [8], [1]), 2),  # the block is being stored from
        (load(17, [1, 9, 2], [10, 11, 4]), 6),  # several: the last of them
    ]
    for position, (job, after) in enumerate(jobs, 1):
        plan = planner.plan(job)
        assert (plan.job_id, plan.seq, plan.after) == (job.job_id, position, after)
        assert plan.direction is job.direction


@pytest.mark.parametrize("job", BAD_JOBS.values(), ids=BAD_JOBS.keys())
def test_a_job_that_is_refused_leaves_no_trace(
    planner: CopyPlanner, job: CopyJob
) -> None:
    with pytest.raises((ValueError, TypeError)):
        planner.plan(job)
    plan = planner.plan(load(2, [0, 1, 2], [3, 4, 5]))
    assert (plan.seq, plan.after) == (1, 0)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (store(1, [3, 12], [0, 1]), "block id 12 is out of range: there are 12"),
        (load(1, [16], [3]), "slot 16 is out of range: there are 16"),
        (load(1, [-7], [3]), "slot -7"),
        (store(1, [3, 4], [0]), "2 block ids for 1 slots"),
        (store(1, [3], [0], group_id=5), r"group 5; known: \[0\]"),
        (store(1, [3, 4], [2, 2]), "slot 2 is named twice"),
        (load(1, [1, 2], [4, 4]), "block id 4 is named twice"),
    ],
)
def test_the_reason_is_clear(planner: CopyPlanner, job: CopyJob, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planner.plan(job)


def test_block_ids_are_checked_against_their_own_group() -> None:
    memory = Memory(two_groups())
    planner = CopyPlanner(memory.groups, memory.layout, memory.pool)
    planner.plan(store(1, [11], [0], group_id=0))
    with pytest.raises(ValueError, match="block id 11 is out of range: there are 9"):
        planner.plan(store(2, [11], [0], group_id=7))


def test_two_groups_may_load_the_same_block_id() -> None:
    memory = Memory(two_groups())
    planner = CopyPlanner(memory.groups, memory.layout, memory.pool)
    parts = (
        *load(1, [0], [3], group_id=0).parts,
        *load(1, [1], [3], group_id=7).parts,
    )
    plan = planner.plan(CopyJob(1, Direction.LOAD, parts))
    assert plan.descriptors.num_bytes == sum(
        memory.layout.record_bytes(group_id) for group_id in (0, 7)
    )


def test_larger_slots_than_needed_will_do() -> None:
    memory = Memory(separate([64]))
    pool = HostPool(4, 128)
    plan = CopyPlanner(memory.groups, memory.layout, pool).plan(store(1, [5], [3]))
    assert plan.descriptors.host.tolist() == [pool.tensor[3].data_ptr()]


def test_groups_layout_and_pool_must_fit() -> None:
    memory = Memory(separate([64]))
    with pytest.raises(ValueError, match="slots of 32 bytes, 64 are needed"):
        CopyPlanner(memory.groups, memory.layout, HostPool(4, 32))
    other = SlotLayout.of(Memory(separate([32])).groups)
    with pytest.raises(ValueError, match="layout is of other groups"):
        CopyPlanner(memory.groups, other, memory.pool)
