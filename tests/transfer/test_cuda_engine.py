"""The engine for CUDA on streams of a fake device; on a real one in ``tests/gpu``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from sam_connector.transfer import CopyEngine, Direction, JobResult
from sam_connector.transfer.copy_device import Mark
from sam_connector.transfer.cuda_engine import CudaCopyEngine
from sam_connector.transfer.layout import Descriptors
from sam_connector.transfer.planner import CopyPlanner
from tests.transfer.engine_contract import PATIENCE_S, EngineContract
from tests.transfer.fake_device import FakeDevice
from tests.transfer.memory import Memory, load, packed, separate, store


def engine_on(memory: Memory, device: FakeDevice) -> CudaCopyEngine:
    planner = CopyPlanner(memory.groups, memory.layout, memory.pool)
    return CudaCopyEngine(planner, device)


class TestEngineOnAFakeDevice(EngineContract):
    def make_engine(self, memory: Memory) -> CopyEngine:
        return engine_on(memory, FakeDevice(seed=3))


MakeDevice = Callable[[int], FakeDevice]


def check_g01_store_waits_for_the_kernel(make: MakeDevice = FakeDevice) -> None:
    memory = Memory(packed([64, 32]))
    for seed in range(200):
        device = make(seed)
        engine = engine_on(memory, device)
        value, block_id, slot = seed % 251, seed % 12, seed % 16

        def kernel(value: int = value, block_id: int = block_id) -> None:
            for region in memory.groups[0]:
                region[block_id] = value

        device.compute(kernel)
        job = store(seed, [block_id], [slot])
        engine.submit(job)
        assert engine.drain(PATIENCE_S)
        assert engine.poll() == [JobResult(seed)]
        assert (memory.pool.tensor[slot, :96] == value).all(), f"iteration {seed}"
        engine.close()


def check_load_waits_for_the_last_reader(make: MakeDevice = FakeDevice) -> None:
    memory = Memory(separate([64]))
    for seed in range(200):
        device = make(seed)
        engine = engine_on(memory, device)
        memory.pool.tensor[2] = seed % 251
        before, seen = memory.block(0, 5), list[bytes]()
        device.compute(lambda seen=seen: seen.append(memory.block(0, 5)))
        engine.submit(load(seed, [2], [5]))
        assert engine.drain(PATIENCE_S)
        device.finish_compute()
        assert seen == [before], f"iteration {seed}"
        engine.close()


def check_opposite_jobs_keep_their_order(make: MakeDevice = FakeDevice) -> None:
    """A block goes to a slot, on to a block, while a store replaces the slot."""
    memory = Memory(separate([64, 64]))
    for seed in range(60):
        engine = engine_on(memory, make(seed))
        jobs = [
            store(0, [seed % 12], [1]),
            load(1, [1], [(seed + 3) % 12]),
            store(2, [(seed + 3) % 12], [2]),
            store(3, [(seed + 5) % 12], [1]),
            load(4, [2], [(seed + 7) % 12]),
        ]
        for job in jobs:
            engine.submit(job)
        assert engine.drain(PATIENCE_S)
        memory.apply(*jobs)
        memory.check()
        engine.close()


def test_g01_a_store_copies_what_the_kernel_before_it_wrote() -> None:
    check_g01_store_waits_for_the_kernel()


def test_a_load_leaves_the_block_to_the_kernel_that_reads_it() -> None:
    check_load_waits_for_the_last_reader()


def test_jobs_that_share_memory_keep_their_order_across_streams() -> None:
    check_opposite_jobs_keep_their_order()


class _NoWaitFor(FakeDevice):
    """A mutant: the streams of one direction, or both, wait for nothing."""

    directions: tuple[Direction, ...] = tuple(Direction)

    def wait(self, direction: Direction, mark: Mark) -> None:
        if direction not in self.directions:
            super().wait(direction, mark)


class _AlwaysStable(FakeDevice):
    """A mutant: every load reads its slots whenever it likes."""

    def copy(
        self, direction: Direction, descriptors: Descriptors, *, is_stable: bool
    ) -> None:
        is_stable = direction is Direction.LOAD
        super().copy(direction, descriptors, is_stable=is_stable)


@pytest.mark.parametrize(
    ("check", "mutant"),
    [
        (check_g01_store_waits_for_the_kernel, _NoWaitFor),
        (check_load_waits_for_the_last_reader, _NoWaitFor),
        (check_opposite_jobs_keep_their_order, _NoWaitFor),
        (check_opposite_jobs_keep_their_order, _AlwaysStable),
    ],
)
def test_without_the_wait_the_check_fails(
    check: Callable[[MakeDevice], None], mutant: MakeDevice
) -> None:
    with pytest.raises(AssertionError):
        check(mutant)


def test_submit_and_poll_do_not_wait_for_the_device() -> None:
    device = FakeDevice()
    memory = Memory(separate([64]))
    engine = engine_on(memory, device)
    is_held = True
    device._push("compute", lambda: not is_held)
    engine.submit(store(1, [1], [1]))
    assert engine.poll() == []
    assert not engine.drain(0.01)
    assert engine.num_in_flight == 1
    is_held = False
    assert engine.drain(PATIENCE_S)
    assert engine.poll() == [JobResult(1)]
    engine.close()


class _Failing(FakeDevice):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.num_synchronized = 0

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise RuntimeError(f"no {where}")

    def mark_current(self) -> Mark:
        self._fail("mark_current")
        return super().mark_current()

    def bind_thread(self) -> None:
        self._fail("bind_thread")

    def wait(self, direction: Direction, mark: Mark) -> None:
        self._fail("wait")
        super().wait(direction, mark)

    def copy(
        self, direction: Direction, descriptors: Descriptors, *, is_stable: bool
    ) -> None:
        super().copy(direction, descriptors, is_stable=is_stable)
        self._fail("copy")

    def mark(self, direction: Direction) -> Mark:
        self._fail("mark")
        return _FailingMark() if self.where == "query" else super().mark(direction)

    def synchronize(self, direction: Direction) -> None:
        self.num_synchronized += 1
        super().synchronize(direction)
        self._fail("synchronize")


class _FailingMark:
    def query(self) -> bool:
        raise RuntimeError("no query")


@pytest.mark.parametrize(
    "where", ["mark_current", "bind_thread", "wait", "copy", "mark", "query"]
)
def test_a_device_that_fails_is_a_result(where: str) -> None:
    device = _Failing(where)
    engine = engine_on(Memory(separate([64])), device)
    engine.submit(store(1, [1], [1]))
    engine.submit(load(2, [2], [2]))
    assert engine.drain(PATIENCE_S)
    errors = {result.job_id: result.error for result in engine.poll()}
    assert errors == dict.fromkeys((1, 2), f"RuntimeError: no {where}")
    engine.close()


def test_a_failed_job_is_reported_when_its_stream_is_at_rest() -> None:
    """Copies that were queued before the failure still write to its memory."""
    device = _Failing("copy")
    engine = engine_on(Memory(separate([64])), device)
    engine.submit(store(1, [1], [1]))
    assert engine.drain(PATIENCE_S)
    assert device.num_synchronized == 1
    assert not device._streams[Direction.STORE]
    engine.close()


def test_a_device_that_cannot_be_waited_for_does_not_stop_close() -> None:
    engine = engine_on(Memory(separate([64])), _Failing("synchronize"))
    engine.submit(store(1, [1], [1]))
    engine.close()
    assert len(engine.poll()) == 1
