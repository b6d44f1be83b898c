"""Copies between a GPU and pinned host slots: streams and events, no waiting."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass

from sam_connector.transfer.contract import CopyEngine, CopyJob, Direction, JobResult
from sam_connector.transfer.copy_device import CopyDevice, Mark
from sam_connector.transfer.ledger import CLOSED, JobLedger, describe
from sam_connector.transfer.planner import CopyPlan, CopyPlanner

DRAIN_INTERVAL_S = 200e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Issued:
    """A job that is on its stream; ``done`` is the end of it."""

    job_id: int
    seq: int
    done: Mark


class CudaCopyEngine(CopyEngine):
    """Jobs go to the stream of their direction, by a thread of the engine's own.

    ``submit`` only marks the current stream: an event there is what a store waits for
    (the kernels that write its blocks) and what a load waits for (the last readers of
    its blocks). Planning and the driver's calls happen on the engine's thread.

    Args:
        planner: for the regions and the pool, which must be pinned.
        device: the streams.
    """

    def __init__(self, planner: CopyPlanner, device: CopyDevice) -> None:
        self._planner = planner
        self._device = device
        self._ledger = JobLedger()
        self._inbox: queue.SimpleQueue[tuple[CopyJob, Mark] | None] = (
            queue.SimpleQueue()
        )
        self._is_closed = False
        # In the order of issue. The engine's thread appends, the caller's removes.
        self._issued: dict[Direction, deque[_Issued]] = {
            direction: deque() for direction in Direction
        }
        self._issued_lock = threading.Lock()
        # Daemon: a process whose engine nobody closed must still be able to exit.
        self._thread = threading.Thread(target=self._run, name="sam-copy", daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        self._ledger.begin()
        if self._is_closed:
            self._ledger.end(job.job_id, CLOSED)
            return
        try:
            ready = self._device.mark_current()
        except Exception as error:
            self._ledger.end(job.job_id, describe(error))
            return
        self._inbox.put((job, ready))

    def poll(self) -> list[JobResult]:
        self._collect()
        return self._ledger.take_results()

    def drain(self, timeout_s: float | None = None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._collect()
            if self._ledger.num_open == 0:
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(DRAIN_INTERVAL_S)

    @property
    def num_in_flight(self) -> int:
        return self._ledger.num_open

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._inbox.put(None)
        self._thread.join()
        for direction in Direction:
            with contextlib.suppress(Exception):
                # A device that has failed says so again when the marks are asked.
                self._device.synchronize(direction)
        self._collect()

    def _collect(self) -> None:
        """Ends the jobs that the device has got past."""
        with self._issued_lock:
            for lane in self._issued.values():
                while lane and self._has_ended(lane[0]):
                    lane.popleft()

    def _has_ended(self, issued: _Issued) -> bool:
        try:
            if not issued.done.query():
                return False
        except Exception as error:
            self._ledger.end(issued.job_id, describe(error))
        else:
            self._ledger.end(issued.job_id)
        return True

    def _run(self) -> None:
        bind_error = None
        try:
            self._device.bind_thread()
        except Exception as error:
            bind_error = describe(error)
        while (item := self._inbox.get()) is not None:
            job, ready = item
            if reason := CLOSED if self._is_closed else bind_error:
                self._ledger.end(job.job_id, reason)
            else:
                self._start(job, ready)

    def _start(self, job: CopyJob, ready: Mark) -> None:
        try:
            plan = self._planner.plan(job)
        except Exception as error:
            self._ledger.end(job.job_id, describe(error))
            return
        try:
            done = self._issue(plan, ready)
        except Exception as error:
            # Some of its copies may be under way, and its memory is free once the
            # job is reported.
            with contextlib.suppress(Exception):
                self._device.synchronize(plan.direction)
            self._ledger.end(job.job_id, describe(error))
            return
        issued = _Issued(job_id=job.job_id, seq=plan.seq, done=done)
        with self._issued_lock:
            self._issued[plan.direction].append(issued)

    def _issue(self, plan: CopyPlan, ready: Mark) -> Mark:
        direction = plan.direction
        self._device.wait(direction, ready)
        conflict = self._last_issued(direction.opposite, plan.after)
        if conflict is not None:
            self._device.wait(direction, conflict)
        # A slot is stable for a load unless a store that is not done writes it.
        is_stable = direction is Direction.LOAD and conflict is None
        self._device.copy(direction, plan.descriptors, is_stable=is_stable)
        return self._device.mark(direction)

    def _last_issued(self, direction: Direction, seq: int) -> Mark | None:
        """The end of the last job up to ``seq`` that is not known to have ended."""
        with self._issued_lock:
            for issued in reversed(self._issued[direction]):
                if issued.seq <= seq:
                    return issued.done
        return None
