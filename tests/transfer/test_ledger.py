from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")

from sam_connector.transfer.contract import JobResult
from sam_connector.transfer.ledger import JobLedger, describe


def test_a_job_is_open_until_it_ends() -> None:
    ledger = JobLedger()
    ledger.begin()
    ledger.begin()
    assert ledger.num_open == 2
    ledger.end(7, "why")
    assert ledger.num_open == 1
    assert not ledger.wait_until_none_open(0)
    ledger.end(3)
    assert ledger.wait_until_none_open(0)


def test_results_are_taken_once() -> None:
    ledger = JobLedger()
    for job_id in (1, 1, 2):
        ledger.begin()
        ledger.end(job_id)
    assert ledger.take_results() == [JobResult(1), JobResult(1), JobResult(2)]
    assert ledger.take_results() == []


def test_a_waiting_thread_wakes_with_the_last_end() -> None:
    ledger = JobLedger()
    ledger.begin()
    threading.Timer(0.02, ledger.end, (1,)).start()
    assert ledger.wait_until_none_open(10)


def test_an_end_without_a_beginning_is_noticed() -> None:
    with pytest.raises(AssertionError, match="job 4"):
        JobLedger().end(4)


@pytest.mark.parametrize(
    ("error", "text"),
    [(ValueError("no"), "ValueError: no"), (MemoryError(), "MemoryError: ")],
)
def test_a_description_is_never_empty(error: Exception, text: str) -> None:
    assert describe(error) == text
