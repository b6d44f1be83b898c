"""What every copy engine must do. A test module subclasses ``EngineContract``."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from sam_connector.transfer import (
    CopyEngine,
    CopyJob,
    Direction,
    GroupCopy,
    JobResult,
)
from tests.transfer.memory import CPU, SHAPES, Memory, Shape, load, separate, store

PATIENCE_S = 15.0

BAD_JOBS = {
    "block_id_too_large": store(1, [3, 12], [0, 1]),
    "block_id_negative": store(1, [3, -1], [0, 1]),
    "slot_too_large": load(1, [0, 16], [3, 4]),
    "slot_negative": load(1, [0, -1], [3, 4]),
    "fewer_slots": store(1, [3, 4], [0]),
    "fewer_blocks": load(1, [0, 1], [3]),
    "unknown_group": store(1, [3], [0], group_id=5),
    "slot_written_twice": store(1, [3, 4], [2, 2]),
    "block_written_twice": load(1, [1, 2], [4, 4]),
    "no_integers": store(1, [3.5, 4.5], [0, 1]),  # type: ignore[list-item]
    "no_list": CopyJob(1, Direction.STORE, (GroupCopy(0, None, [1]),)),  # type: ignore[arg-type]
    "a_number_beyond_64_bits": store(1, [2**70], [1]),
    "second_part_is_bad": CopyJob(
        1, Direction.STORE, (GroupCopy(0, [3], [0]), GroupCopy(0, [99], [1]))
    ),
    "slot_written_by_two_parts": CopyJob(
        1, Direction.STORE, (GroupCopy(0, [3], [0]), GroupCopy(0, [4], [0]))
    ),
}


class EngineContract:
    """Run against one engine by a subclass with its own ``make_engine``."""

    device = CPU
    pin = False

    def make_engine(self, memory: Memory) -> CopyEngine:
        raise NotImplementedError

    def keep_busy(self) -> None:
        """Gives the device work that jobs queue up behind, if there is a device."""

    def finish_work(self) -> None:
        """Waits for what the device's current stream was given."""

    @contextmanager
    def running(
        self, shape: Shape | None = None, *, num_slots: int = 16
    ) -> Iterator[tuple[Memory, CopyEngine]]:
        memory = Memory(
            shape or separate([256, 96]),
            num_slots=num_slots,
            device=self.device,
            pin=self.pin,
        )
        engine = self.make_engine(memory)
        try:
            yield memory, engine
        finally:
            engine.close()
            memory.pool.close()

    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
    def test_bytes_go_to_the_host_and_come_back(
        self, shape: Callable[[], Shape]
    ) -> None:
        with self.running(shape()) as (memory, engine):
            groups = sorted(memory.groups)
            jobs = [
                _both_groups(1, Direction.STORE, groups, [7, 2, 5, 1], [3, 9, 0, 12]),
                _both_groups(2, Direction.LOAD, groups, [8, 0, 3, 6], [0, 12, 3, 9]),
            ]
            for job in jobs:
                engine.submit(job)
            assert engine.drain(PATIENCE_S)
            assert sorted(engine.poll(), key=_by_id) == [JobResult(1), JobResult(2)]
            memory.apply(*jobs)
            memory.check()

    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
    @pytest.mark.parametrize("direction", Direction)
    def test_any_order_of_ids(
        self, shape: Callable[[], Shape], direction: Direction
    ) -> None:
        """Runs, in either order on either side, and ids that jump."""
        runs = [
            ([0, 1, 2, 3], [4, 5, 6, 7]),
            ([3, 2, 1, 0], [7, 6, 5, 4]),
            ([0, 1, 2, 3], [7, 6, 5, 4]),
            ([8, 3, 4, 0], [15, 3, 4, 1]),
        ]
        with self.running(shape()) as (memory, engine):
            for job_id, (block_ids, slots) in enumerate(runs):
                part = GroupCopy(min(memory.groups), block_ids, slots)
                job = CopyJob(job_id, direction, (part,))
                engine.submit(job)
                assert engine.drain(PATIENCE_S)
                assert engine.poll() == [JobResult(job_id)]
                memory.apply(job)
                memory.check()

    def test_large_blocks(self) -> None:
        """Large enough to be shared among threads and cut in the middle."""
        shape = separate([1_500_001, 700_000], num_blocks=6)
        with self.running(shape, num_slots=4) as (memory, engine):
            jobs = [store(1, [5, 0, 3], [1, 3, 2]), load(2, [3, 1], [4, 2])]
            for job in jobs:
                engine.submit(job)
            assert engine.drain(PATIENCE_S)
            assert {result.error for result in engine.poll()} == {None}
            memory.apply(*jobs)
            memory.check()

    def test_a_job_without_blocks_ends_well(self) -> None:
        with self.running() as (memory, engine):
            engine.submit(CopyJob(1, Direction.STORE, ()))
            engine.submit(load(2, [], []))
            assert engine.drain(PATIENCE_S)
            assert sorted(engine.poll(), key=_by_id) == [JobResult(1), JobResult(2)]
            memory.check()

    def test_a_slot_may_be_loaded_into_several_blocks(self) -> None:
        with self.running() as (memory, engine):
            job = load(1, [5, 5], [2, 9])
            engine.submit(job)
            assert engine.drain(PATIENCE_S)
            assert engine.poll() == [JobResult(1)]
            memory.apply(job)
            memory.check()

    @pytest.mark.parametrize("job", BAD_JOBS.values(), ids=BAD_JOBS.keys())
    def test_a_bad_job_is_an_error_and_touches_nothing(self, job: CopyJob) -> None:
        with self.running() as (memory, engine):
            engine.submit(job)
            assert engine.drain(PATIENCE_S)
            (result,) = engine.poll()
            assert result.job_id == 1
            assert result.error
            memory.check()
            good = store(2, [3], [0])
            engine.submit(good)
            assert engine.drain(PATIENCE_S)
            assert engine.poll() == [JobResult(2)]
            memory.apply(good)
            memory.check()

    def test_a_thousand_jobs_are_each_reported_once(self) -> None:
        rng = random.Random(5)
        shape = separate([64, 32], num_blocks=50)
        with self.running(shape, num_slots=50) as (memory, engine):
            results: list[JobResult] = []
            for job_id in range(1000):
                block_id, slot = rng.randrange(50), rng.randrange(50)
                job = rng.choice(
                    [
                        store(job_id, [block_id], [slot]),
                        load(job_id, [slot], [block_id]),
                    ]
                )
                engine.submit(job)
                memory.apply(job)
                if job_id % 37 == 0:
                    results += engine.poll()
            assert engine.drain(PATIENCE_S)
            assert engine.num_in_flight == 0
            results += engine.poll()
            assert sorted(results, key=_by_id) == [JobResult(n) for n in range(1000)]
            assert engine.poll() == []
            memory.check()

    def test_a_load_sees_an_earlier_store_to_its_slot(self) -> None:
        """Bytes are handed on through block and slot, one job after the other."""
        shape = separate([40_000, 20_000], num_blocks=40)
        with self.running(shape, num_slots=40) as (memory, engine):
            jobs = [store(0, range(20, 40), range(20, 40))]
            for step in range(18):
                jobs.append(store(len(jobs), [step], [step]))
                jobs.append(load(len(jobs), [step], [step + 1]))
            self._run_in_order(memory, engine, jobs)
            assert memory.block(0, 18) == memory.block(0, 0)

    def test_a_store_does_not_overtake_an_earlier_load(self) -> None:
        """Slots are overwritten as soon as the load that reads them was submitted."""
        shape = separate([40_000, 20_000], num_blocks=40)
        with self.running(shape, num_slots=40) as (memory, engine):
            jobs = [load(0, range(20, 40), range(20, 40))]
            for step in range(18):
                jobs.append(load(len(jobs), [step], [step]))
                jobs.append(store(len(jobs), [step + 1], [step]))
            self._run_in_order(memory, engine, jobs)

    def test_a_store_sees_an_earlier_load_of_its_block(self) -> None:
        shape = separate([40_000, 20_000], num_blocks=40)
        with self.running(shape, num_slots=40) as (memory, engine):
            jobs = [store(0, range(20, 40), range(20, 40))]
            for step in range(9):
                jobs.append(load(len(jobs), [step], [step]))
                jobs.append(load(len(jobs), [step + 9], [step + 9]))
                jobs.append(store(len(jobs), [step + 9], [step + 20]))
            self._run_in_order(memory, engine, jobs)

    def test_a_load_does_not_disturb_an_earlier_store_of_its_block(self) -> None:
        shape = separate([40_000, 20_000], num_blocks=40)
        with self.running(shape, num_slots=40) as (memory, engine):
            jobs = [load(0, range(20, 40), range(20, 40))]
            for step in range(9):
                jobs.append(store(len(jobs), [step], [step]))
                jobs.append(store(len(jobs), [step + 9], [step + 9]))
                jobs.append(load(len(jobs), [step + 20], [step + 9]))
            self._run_in_order(memory, engine, jobs)

    def test_jobs_of_one_direction_keep_their_order(self) -> None:
        shape = separate([40_000], num_blocks=40)
        with self.running(shape, num_slots=40) as (memory, engine):
            stores = [
                store(0, range(40), range(40)),
                store(1, range(10, 20), range(10)),
                store(2, [30], [0]),
            ]
            self._run_in_order(memory, engine, stores)
            loads = [
                load(3, range(40), range(40)),
                load(4, range(10, 20), range(10)),
                load(5, [30], [0]),
            ]
            self._run_in_order(memory, engine, loads)

    def _run_in_order(
        self, memory: Memory, engine: CopyEngine, jobs: list[CopyJob]
    ) -> None:
        self.keep_busy()
        for job in jobs:
            engine.submit(job)
        assert engine.drain(PATIENCE_S)
        results = sorted(engine.poll(), key=_by_id)
        assert results == [JobResult(job.job_id) for job in jobs]
        memory.apply(*jobs)
        memory.check()

    def test_all_bytes_are_in_the_slots_once_a_store_is_reported(self) -> None:
        """And none is read any more: the block is somebody else's at once."""
        shape = separate([400_000, 200_000])
        with self.running(shape) as (memory, engine):
            for step in range(12):
                job = store(step, [step], [step])
                memory.apply(job)
                engine.submit(job)
                self._await_result(engine, step)
                copied = memory.pool.tensor[step].numpy().copy()
                for region in memory.groups[0]:
                    region[step].fill_(step)
                assert (copied == memory.model_pool[step]).all()
            self.finish_work()
            assert (memory.pool.tensor.numpy() == memory.model_pool).all()

    def test_work_after_a_reported_load_sees_its_bytes(self) -> None:
        """And the slot is somebody else's at once."""
        shape = separate([400_000, 200_000])
        with self.running(shape) as (memory, engine):
            for step in range(12):
                engine.submit(load(step, [step], [step]))
                memory.apply(load(step, [step], [step]))
                self._await_result(engine, step)
                memory.pool.tensor[step].fill_(step)
                seen = [region[step].clone() for region in memory.groups[0]]
                self.finish_work()
                assert b"".join(
                    bytes(each.cpu().numpy()) for each in seen
                ) == memory.block(0, step)
            for buffer, expected in zip(
                memory.buffers, memory.model_buffers, strict=True
            ):
                assert (buffer.cpu().numpy() == expected).all()

    def _await_result(self, engine: CopyEngine, job_id: int) -> None:
        """By asking again and again, as a worker does."""
        deadline = time.monotonic() + PATIENCE_S
        # Engines that hold jobs back let them go when they are drained.
        engine.drain(0)
        while not (results := engine.poll()):
            assert time.monotonic() < deadline
            time.sleep(0)
        assert results == [JobResult(job_id)]

    def test_results_survive_drain_and_close(self) -> None:
        with self.running() as (_, engine):
            engine.submit(store(1, [1], [1]))
            assert engine.drain(PATIENCE_S)
            assert engine.drain(PATIENCE_S)
            assert engine.num_in_flight == 0
            engine.close()
            assert engine.poll() == [JobResult(1)]

    def test_close_ends_every_job_one_way_or_the_other(self) -> None:
        shape = separate([200_000], num_blocks=40)
        with self.running(shape, num_slots=40) as (memory, engine):
            jobs = [store(index, [index], [39 - index]) for index in range(40)]
            for job in jobs:
                engine.submit(job)
            engine.close()
            assert engine.num_in_flight == 0
            results = {result.job_id: result.error for result in engine.poll()}
            assert sorted(results) == list(range(40))
            memory.apply(*(job for job in jobs if results[job.job_id] is None))
            memory.check()

    def test_a_closed_engine_refuses(self) -> None:
        with self.running() as (memory, engine):
            engine.close()
            engine.submit(store(1, [1], [1]))
            assert engine.drain(PATIENCE_S)
            (result,) = engine.poll()
            assert "closed" in (result.error or "")
            engine.close()
            memory.check()

    def test_an_idle_engine_has_nothing_to_wait_for(self) -> None:
        with self.running() as (_, engine):
            assert engine.drain(0)
            assert engine.poll() == []
            assert engine.num_in_flight == 0


def _both_groups(
    job_id: int,
    direction: Direction,
    groups: list[int],
    block_ids: list[int],
    slots: list[int],
) -> CopyJob:
    """The same blocks of every group, in slots of their own."""
    return CopyJob(
        job_id,
        direction,
        tuple(
            GroupCopy(group_id, block_ids, [(slot + index) % 16 for slot in slots])
            for index, group_id in enumerate(groups)
        ),
    )


def _by_id(result: JobResult) -> int:
    return result.job_id
