"""Runs the planned turns against one server and records what came of each."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.demo.client import Completion, DemoClient
from benchmarks.demo.harness import Harness
from benchmarks.demo.workload import Turn, Workload

_KV_USAGE = re.compile(r"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)$", re.MULTILINE)
_PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total\{[^}]*\} (\S+)$", re.MULTILINE)
_METRICS_PERIOD_S = 0.5
_PROGRESS_PERIOD_S = 5.0


@dataclass(kw_only=True)
class RunRecord:
    """Everything one replay measured.

    Attributes:
        results: by turn index.
        saved_bytes: copied from the KV cache to host memory.
        loaded_bytes: copied back.
    """

    results: dict[int, Completion] = field(default_factory=dict)
    peak_cache_use: float = 0.0
    num_preemptions: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0
    duration_s: float = 0.0


class Replay:
    """One pass over the workload.

    Args:
        harness: tells the server about the agents, or nothing.
        report: called with one line of progress now and then.
    """

    def __init__(
        self,
        client: DemoClient,
        workload: Workload,
        *,
        harness: Harness,
        report: Callable[[str], None],
    ) -> None:
        self._client = client
        self._workload = workload
        self._harness = harness
        self._report = report
        self._begin_s = 0.0
        self._started = {turn.index: asyncio.Event() for turn in workload.turns}
        self._ended = {turn.index: asyncio.Event() for turn in workload.turns}
        self._record = RunRecord()

    async def run(self) -> RunRecord:
        preemptions = await self._num_preemptions()
        self._begin_s = time.monotonic()
        watch = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                for turn in self._workload.turns:
                    group.create_task(self._run_turn(turn, group))
        finally:
            watch.cancel()
        self._record.duration_s = time.monotonic() - self._begin_s
        self._record.num_preemptions = await self._num_preemptions() - preemptions
        return self._record

    async def _run_turn(self, turn: Turn, group: asyncio.TaskGroup) -> None:
        for index in turn.wait_for:
            await self._ended[index].wait()
        if turn.follows_start_of is not None:
            await self._started[turn.follows_start_of].wait()
        group.create_task(self._harness.on_ready(turn))
        await asyncio.sleep(turn.gap_s)
        prompt = self._workload.prompt(turn)
        self._started[turn.index].set()
        self._record.results[turn.index] = await self._client.stream(
            prompt, turn.num_output_tokens, self._harness.hint(turn)
        )
        self._ended[turn.index].set()
        group.create_task(self._harness.on_answer(turn))

    async def _num_preemptions(self) -> int:
        found = _PREEMPTIONS.search(await self._client.metrics())
        return int(float(found[1])) if found else 0

    async def _watch(self) -> None:
        """Sample cache use and report progress until cancelled."""
        report_at = time.monotonic() + _PROGRESS_PERIOD_S
        while True:
            await asyncio.sleep(_METRICS_PERIOD_S)
            found = _KV_USAGE.search(await self._client.metrics())
            if found:
                use = float(found[1])
                self._record.peak_cache_use = max(self._record.peak_cache_use, use)
            if time.monotonic() >= report_at:
                report_at += _PROGRESS_PERIOD_S
                self._report(self._progress())

    def _progress(self) -> str:
        results = self._record.results.values()
        prompt = sum(done.prompt_tokens for done in results)
        cached = sum(done.cached_tokens for done in results)
        return (
            f"{time.monotonic() - self._begin_s:5.0f} s  "
            f"{len(results):3d}/{len(self._workload.turns)} requests  "
            f"{cached / prompt if prompt else 0.0:6.1%} of prompt tokens cached"
        )
