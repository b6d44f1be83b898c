"""An idle engine is woken for single steps."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest

from sam_connector.connector.waker import EngineWaker

pytestmark = pytest.mark.vllm


class Engine:
    def __init__(self) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.sleeps = False

    def is_sleeping(self) -> bool:
        return self.sleeps


def test_a_wake_up_is_vllm_s_own_message() -> None:
    from vllm.v1.engine import EngineCoreRequestType

    waker, engine = EngineWaker(), Engine()
    waker.attach(engine)
    assert not waker.is_due
    waker.wake()
    assert waker.is_due
    assert engine.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)


def test_without_an_engine_a_step_is_only_wanted() -> None:
    waker = EngineWaker()
    waker.wake()
    assert waker.is_due
    assert not waker.is_attached
    assert not waker.is_paused


def test_an_engine_in_the_caller_s_process_has_no_queue() -> None:
    waker = EngineWaker()
    waker.attach(object())
    assert not waker.is_attached


def test_it_tells_whether_the_engine_is_paused() -> None:
    waker, engine = EngineWaker(), Engine()
    waker.attach(engine)
    assert not waker.is_paused
    engine.sleeps = True
    assert waker.is_paused


def test_while_ranks_are_busy_one_step_after_the_other_is_wanted() -> None:
    waker, engine = EngineWaker(), Engine()
    waker.attach(engine)
    waker.set_busy(True)
    for _ in range(3):
        engine.input_queue.get(timeout=5)
        time.sleep(0.05)
        assert engine.input_queue.empty()  # not before the step has been taken
        waker.is_due = False
    waker.set_busy(False)
    waker.close()


def test_when_nothing_is_under_way_it_sleeps() -> None:
    waker, engine = EngineWaker(), Engine()
    waker.attach(engine)
    waker.set_busy(True)
    engine.input_queue.get(timeout=5)
    waker.set_busy(False)
    waker.is_due = False
    time.sleep(0.1)
    while not engine.input_queue.empty():  # one may have been on its way
        engine.input_queue.get_nowait()
    waker.is_due = False
    time.sleep(0.1)
    assert engine.input_queue.empty()
    waker.close()
