from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from sam_connector.transfer import CopyEngine, Direction, JobResult, make_copy_engine
from sam_connector.transfer.cpu_engine import CpuCopyEngine
from sam_connector.transfer.gather import GatherCopier
from sam_connector.transfer.layout import Descriptors
from sam_connector.transfer.planner import CopyPlan, CopyPlanner
from tests.transfer.engine_contract import PATIENCE_S, EngineContract
from tests.transfer.memory import CPU, Memory, load, separate, store


class TestCpuEngine(EngineContract):
    def make_engine(self, memory: Memory) -> CopyEngine:
        return make_copy_engine(memory.groups, memory.layout, memory.pool, device=CPU)


class TestCpuEngineOfOneThread(EngineContract):
    def make_engine(self, memory: Memory) -> CopyEngine:
        return make_copy_engine(
            memory.groups, memory.layout, memory.pool, device=CPU, num_threads=1
        )


class TestCpuEngineWithAFullQueue(EngineContract):
    """No copy begins before the test waits for one, so that all jobs are queued."""

    def make_engine(self, memory: Memory) -> CopyEngine:
        return _Held(CopyPlanner(memory.groups, memory.layout, memory.pool), 2)


class _Held(CpuCopyEngine):
    def __init__(self, planner: CopyPlanner, num_threads: int) -> None:
        self._gate = threading.Event()
        super().__init__(planner, num_threads)

    def _execute(self, plan: CopyPlan) -> None:
        assert self._gate.wait(PATIENCE_S)
        super()._execute(plan)

    def drain(self, timeout_s: float | None = None) -> bool:
        self._gate.set()
        return super().drain(timeout_s)

    def close(self) -> None:
        # Late enough for the engine to know that it is closed.
        threading.Timer(0.05, self._gate.set).start()
        super().close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No copy begins before it is set."""
    gate = threading.Event()
    real = GatherCopier.copy

    def copy(self: GatherCopier, part: Descriptors, direction: Direction) -> None:
        assert gate.wait(PATIENCE_S)
        real(self, part, direction)

    monkeypatch.setattr(GatherCopier, "copy", copy)
    yield gate
    gate.set()


def _engine(memory: Memory, num_threads: int = 2) -> CpuCopyEngine:
    planner = CopyPlanner(memory.groups, memory.layout, memory.pool)
    return CpuCopyEngine(planner, num_threads)


def test_submit_and_poll_do_not_wait_for_a_copy(gate: threading.Event) -> None:
    memory = Memory(separate([64]))
    engine = _engine(memory)
    jobs = [store(1, [1], [1]), load(2, [2], [2])]
    for job in jobs:
        engine.submit(job)
    assert engine.poll() == []
    assert engine.num_in_flight == 2
    assert not engine.drain(0.01)
    gate.set()
    assert engine.drain(PATIENCE_S)
    assert len(engine.poll()) == 2
    engine.close()
    memory.apply(*jobs)
    memory.check()


def test_close_fails_what_has_not_begun(gate: threading.Event) -> None:
    memory = Memory(separate([64]))
    engine = _engine(memory)
    for job_id in range(5):
        engine.submit(store(job_id, [job_id], [job_id]))
    closing = threading.Thread(target=engine.close)
    closing.start()
    while not engine._is_closed:
        threading.Event().wait(0.001)
    gate.set()
    closing.join()
    errors = {result.job_id: result.error for result in engine.poll()}
    assert sorted(errors) == list(range(5))
    assert all(errors[job_id] for job_id in range(1, 5))


@pytest.mark.parametrize("broken", ["own_share", "share_of_another_thread"])
def test_a_copy_that_fails_is_a_result(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    memory = Memory(separate([2_000_000], num_blocks=4))
    engine = _engine(memory)
    index = 0 if broken == "own_share" else 1

    def fail(part: Descriptors, direction: Direction) -> None:
        raise OSError(14, "bad address")

    with monkeypatch.context() as patch:
        patch.setattr(engine._copiers[index], "copy", fail, raising=False)
        engine.submit(store(1, [1, 2], [1, 2]))
        assert engine.drain(PATIENCE_S)
    (result,) = engine.poll()
    assert "bad address" in (result.error or "")
    engine.submit(store(2, [1, 2], [1, 2]))
    assert engine.drain(PATIENCE_S)
    assert engine.poll() == [JobResult(2)]
    engine.close()


def test_a_failed_job_ends_when_all_of_its_threads_have_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory is used for other things as soon as it is reported."""
    memory = Memory(separate([2_000_000], num_blocks=4))
    engine = _engine(memory)
    gate = threading.Event()

    def fail(part: Descriptors, direction: Direction) -> None:
        raise OSError(14, "bad address")

    def late(part: Descriptors, direction: Direction) -> None:
        assert gate.wait(PATIENCE_S)

    monkeypatch.setattr(engine._copiers[0], "copy", fail, raising=False)
    monkeypatch.setattr(engine._copiers[1], "copy", late, raising=False)
    engine.submit(store(1, [1, 2], [1, 2]))
    assert not engine.drain(0.1)
    gate.set()
    assert engine.drain(PATIENCE_S)
    engine.close()


def test_a_load_is_not_held_up_by_the_stores_before_it(gate: threading.Event) -> None:
    memory = Memory(separate([64]))
    engine = _engine(memory)
    for job_id in range(8):
        engine.submit(store(job_id, [job_id], [job_id]))
    engine.submit(load(99, [12], [11]))
    gate.set()
    assert engine.drain(PATIENCE_S)
    ended = [result.job_id for result in engine.poll()]
    assert ended.index(99) <= 2
    engine.close()


def test_at_least_one_thread() -> None:
    memory = Memory(separate([64]))
    with pytest.raises(ValueError, match="num_threads"):
        _engine(memory, num_threads=0)
