"""Copies between CPU tensors and host slots, off the caller's thread."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from sam_connector.transfer.contract import CopyEngine, CopyJob, JobResult
from sam_connector.transfer.gather import GatherCopier
from sam_connector.transfer.lanes import Lanes
from sam_connector.transfer.layout import split_by_bytes
from sam_connector.transfer.ledger import CLOSED, JobLedger, describe
from sam_connector.transfer.planner import CopyPlan, CopyPlanner

#: Handing a share to another thread costs about what copying this much does.
MIN_SHARE_BYTES = 512 * 1024


class CpuCopyEngine(CopyEngine):
    """One job at a time, its bytes shared among threads.

    There is no compute stream on a CPU: what the caller's thread wrote before
    ``submit`` is visible to the threads here, and what must not be overwritten has
    been read.

    Args:
        planner: for the regions and the pool.
        num_threads: threads that copy, at least one.
    """

    def __init__(self, planner: CopyPlanner, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, at least 1 is needed")
        self._planner = planner
        self._ledger = JobLedger()
        self._inbox: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._is_closed = False
        self._copiers = [GatherCopier() for _ in range(num_threads)]
        self._helpers = ThreadPoolExecutor(
            max(1, num_threads - 1), thread_name_prefix="sam-copy-helper"
        )
        # Daemon: a process whose engine nobody closed must still be able to exit.
        self._thread = threading.Thread(target=self._run, name="sam-copy", daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        self._ledger.begin()
        if self._is_closed:
            self._ledger.end(job.job_id, CLOSED)
        else:
            self._inbox.put(job)

    def poll(self) -> list[JobResult]:
        return self._ledger.take_results()

    def drain(self, timeout_s: float | None = None) -> bool:
        return self._ledger.wait_until_none_open(timeout_s)

    @property
    def num_in_flight(self) -> int:
        return self._ledger.num_open

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._inbox.put(None)
        self._thread.join()
        self._helpers.shutdown()

    def _run(self) -> None:
        lanes = Lanes()
        while not self._is_closed:
            self._take_in(lanes)
            if lanes:
                self._execute(lanes.pop())
        while lanes:
            self._ledger.end(lanes.pop().job_id, CLOSED)
        while not self._inbox.empty():
            if job := self._inbox.get():
                self._ledger.end(job.job_id, CLOSED)

    def _take_in(self, lanes: Lanes) -> None:
        """Plans all that was submitted; waits only when there is nothing to do."""
        while not lanes or not self._inbox.empty():
            job = self._inbox.get()
            if job is None:
                return
            try:
                lanes.push(self._planner.plan(job))
            except Exception as error:
                self._ledger.end(job.job_id, describe(error))

    def _execute(self, plan: CopyPlan) -> None:
        error = None
        others: list[Future[None]] = []
        try:
            shares = split_by_bytes(
                plan.descriptors, len(self._copiers), min_bytes=MIN_SHARE_BYTES
            )
            for copier, share in zip(self._copiers[1:], shares[1:], strict=False):
                others.append(self._helpers.submit(copier.copy, share, plan.direction))
            self._copiers[0].copy(shares[0], plan.direction)
        except Exception as failure:
            error = describe(failure)
        # Reported only when no thread touches the job's memory any more.
        for other in others:
            if failure_elsewhere := other.exception():
                error = error or describe(failure_elsewhere)
        self._ledger.end(plan.job_id, error)
