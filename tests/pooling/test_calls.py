"""The thread that speaks to a store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from sam_connector.core.clock import MonotonicClock
from sam_connector.pooling.calls import CallThread
from tests.pooling.bench import eventually


@pytest.fixture
def thread() -> Iterator[CallThread]:
    made = CallThread("test-calls", MonotonicClock(), tick_s=0.01, on_tick=lambda: None)
    yield made
    made.close(5.0)


def test_calls_are_made_in_order(thread: CallThread) -> None:
    done: list[int] = []
    for index in range(100):
        thread.submit(lambda index=index: done.append(index))  # type: ignore[misc]
    eventually(lambda: len(done) == 100)
    assert done == list(range(100))


def test_a_call_may_wait(thread: CallThread) -> None:
    done: list[str] = []
    thread.submit(lambda: done.append("later"), delay_s=0.1)
    thread.submit(lambda: done.append("now"))
    eventually(lambda: len(done) == 2)
    assert done == ["now", "later"]


def test_d03_a_call_that_raises_does_not_end_the_thread(
    thread: CallThread, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("an internal error")

    done = threading.Event()
    with caplog.at_level(logging.ERROR):
        thread.submit(fail)
        thread.submit(done.set)
        assert done.wait(5)
    assert "went wrong" in caplog.text


def test_it_ticks_though_nothing_is_asked_of_it() -> None:
    ticks: list[int] = []
    thread = CallThread(
        "test-ticks", MonotonicClock(), tick_s=0.01, on_tick=lambda: ticks.append(1)
    )
    eventually(lambda: len(ticks) > 3)
    thread.close(5.0)


def test_after_the_end_nothing_is_called() -> None:
    done: list[int] = []
    thread = CallThread("test-end", MonotonicClock(), tick_s=0.01, on_tick=lambda: None)
    thread.close(5.0)
    thread.submit(lambda: done.append(1))
    thread.close(5.0)
    assert done == []


def test_the_end_does_not_wait_for_a_call_that_hangs() -> None:
    gate, begun = threading.Event(), threading.Event()
    done: list[int] = []
    thread = CallThread("test-hang", MonotonicClock(), tick_s=5.0, on_tick=lambda: None)

    def hang() -> None:
        begun.set()
        gate.wait(10)

    thread.submit(hang)
    thread.submit(lambda: done.append(1))
    assert begun.wait(5)
    thread.close(0.05)
    gate.set()
    thread.close(5.0)
    assert done == []
    assert not thread._thread.is_alive()
