"""The contract and the races on a real device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")
import torch

from sam_connector.transfer import CopyEngine, Direction, JobResult, make_copy_engine
from sam_connector.transfer.copy_device import CudaDevice, Mark
from sam_connector.transfer.cuda_driver import (
    BATCH_SINCE,
    BatchCopy,
    SingleCopies,
    load_copy_call,
)
from sam_connector.transfer.cuda_engine import CudaCopyEngine
from sam_connector.transfer.planner import CopyPlanner
from tests.transfer.engine_contract import PATIENCE_S, EngineContract
from tests.transfer.memory import Memory, load, separate, store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

#: Long against the microseconds that a copy takes.
KERNEL_CYCLES = 2_000_000
#: Long against the time in which a test submits all its jobs: tens of milliseconds.
LONG_CYCLES = 50_000_000
#: A kernel of a second or so.
VERY_LONG_CYCLES = 1_000_000_000
NUM_ITERATIONS = 200

MakeDevice = Callable[[torch.device], CudaDevice]


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _memory(block_bytes: int = 65_536) -> Memory:
    return Memory(separate([block_bytes, block_bytes]), device=_gpu(), pin=True)


def _engine(memory: Memory, make: MakeDevice = CudaDevice) -> CudaCopyEngine:
    planner = CopyPlanner(memory.groups, memory.layout, memory.pool)
    return CudaCopyEngine(planner, make(_gpu()))


class TestCudaEngine(EngineContract):
    pin = True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _gpu()

    def make_engine(self, memory: Memory) -> CopyEngine:
        return make_copy_engine(
            memory.groups, memory.layout, memory.pool, device=self.device
        )

    def keep_busy(self) -> None:
        torch.cuda._sleep(LONG_CYCLES)

    def finish_work(self) -> None:
        torch.cuda.current_stream().synchronize()


class TestCudaEngineOneByOne(TestCudaEngine):
    """With a driver that has no call for lists."""

    def make_engine(self, memory: Memory) -> CopyEngine:
        singly = load_copy_call(find=lambda name, version: 0)
        assert isinstance(singly, SingleCopies)
        return _engine(memory, lambda gpu: CudaDevice(gpu, copy_call=singly))


def test_this_driver_copies_lists() -> None:
    if torch._C._cuda_getDriverVersion() < BATCH_SINCE:
        pytest.skip("cuMemcpyBatchAsync came with CUDA 12.8")
    assert isinstance(load_copy_call(), BatchCopy)


def check_g01_store_waits_for_the_kernel(make: MakeDevice = CudaDevice) -> None:
    memory = _memory()
    engine = _engine(memory, make)
    try:
        for step in range(NUM_ITERATIONS):
            block_id, slot, value = step % 12, step % 16, step % 251 + 1
            torch.cuda._sleep(KERNEL_CYCLES)
            for region in memory.groups[0]:
                region[block_id].fill_(value)
            engine.submit(store(step, [block_id], [slot]))
            assert engine.drain(PATIENCE_S)
            assert engine.poll() == [JobResult(step)]
            record = memory.pool.tensor[slot, : memory.layout.record_bytes(0)]
            assert bool((record == value).all()), f"iteration {step}"
    finally:
        torch.cuda.synchronize()
        engine.close()
        memory.pool.close()


def check_load_waits_for_the_last_reader(make: MakeDevice = CudaDevice) -> None:
    memory = _memory()
    engine = _engine(memory, make)
    seen = torch.empty(65_536, dtype=torch.uint8, device=_gpu())
    try:
        for step in range(NUM_ITERATIONS):
            block_id, slot = step % 12, step % 16
            memory.pool.tensor[slot].fill_(step % 251)
            before = memory.groups[0][0][block_id].clone()
            torch.cuda._sleep(KERNEL_CYCLES)
            seen.copy_(memory.groups[0][0][block_id])
            engine.submit(load(step, [slot], [block_id]))
            assert engine.drain(PATIENCE_S)
            assert engine.poll() == [JobResult(step)]
            assert torch.equal(seen, before), f"iteration {step}"
            now = memory.groups[0][0][block_id]
            assert bool((now == step % 251).all()), f"iteration {step}"
    finally:
        torch.cuda.synchronize()
        engine.close()
        memory.pool.close()


def test_g01_a_store_copies_what_the_kernel_before_it_wrote() -> None:
    check_g01_store_waits_for_the_kernel()


def test_a_load_leaves_the_block_to_the_kernel_that_reads_it() -> None:
    check_load_waits_for_the_last_reader()


class _NoWait(CudaDevice):
    """A mutant: the copy streams wait for nothing."""

    def wait(self, direction: Direction, mark: Mark) -> None:
        pass


@pytest.mark.parametrize(
    "check",
    [check_g01_store_waits_for_the_kernel, check_load_waits_for_the_last_reader],
)
def test_without_the_wait_the_check_fails(
    check: Callable[[MakeDevice], None],
) -> None:
    with pytest.raises(AssertionError, match="iteration"):
        check(_NoWait)


def test_submit_poll_and_a_short_drain_do_not_wait_for_the_device() -> None:
    """However many jobs there are: the kernel before them is still running then."""
    memory = _memory()
    engine = _engine(memory)
    torch.cuda._sleep(VERY_LONG_CYCLES)
    running = torch.cuda.Event()
    running.record()
    for job_id in range(0, 100, 2):
        engine.submit(store(job_id, range(6), range(6)))
        engine.submit(load(job_id + 1, range(6, 12), range(6, 12)))
    assert engine.poll() == []
    assert not engine.drain(0.01)
    assert engine.num_in_flight == 100
    assert not running.query()
    assert engine.drain(PATIENCE_S)
    assert sorted(result.job_id for result in engine.poll()) == list(range(100))
    assert running.query()
    engine.close()
    memory.pool.close()


def test_the_current_stream_need_not_be_the_default_one() -> None:
    """A store waits for the stream that it was submitted under, and a load does."""
    memory = _memory()
    engine = _engine(memory)
    seen = torch.empty(65_536, dtype=torch.uint8, device=_gpu())
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG_CYCLES)
        for region in memory.groups[0]:
            region[3].fill_(77)
        engine.submit(store(1, [3], [5]))
        assert engine.drain(PATIENCE_S)
        record = memory.pool.tensor[5, : memory.layout.record_bytes(0)]
        assert bool((record == 77).all())
        memory.pool.tensor[6].fill_(78)
        torch.cuda._sleep(LONG_CYCLES)
        seen.copy_(memory.groups[0][0][3])
        engine.submit(load(2, [6], [3]))
        assert engine.drain(PATIENCE_S)
        torch.cuda.synchronize()
    assert bool((seen == 77).all())
    assert bool((memory.groups[0][0][3] == 78).all())
    assert engine.poll() == [JobResult(1), JobResult(2)]
    engine.close()
    memory.pool.close()


def test_close_waits_for_copies_behind_a_kernel() -> None:
    memory = _memory()
    engine = _engine(memory)
    torch.cuda._sleep(LONG_CYCLES)
    job = store(1, range(12), range(12))
    engine.submit(job)
    engine.close()
    (result,) = engine.poll()
    if result.error is None:
        memory.apply(job)
    memory.check()
    memory.pool.close()


def test_a_pinned_pool_is_pinned_and_unpinned() -> None:
    memory = _memory()
    assert memory.pool.tensor.is_pinned()
    view = memory.pool.tensor
    memory.pool.close()
    assert not view.is_pinned()
