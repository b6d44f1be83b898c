"""Every draw of every pool size is one job; jobs share nothing and run in parallel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

# Before vLLM is imported: its start-up notes are not part of the result.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One draw on one pool; everything a process needs to know.

    Attributes:
        kind: ``agents``, ``conversation`` or ``direct``.
        draw: 0 is as recorded; in any other tasks start up to 30 s later.
        arms: their names; ``None`` is all.
    """

    kind: str
    trace: Path
    gpu_tokens: int
    host_ratio: float
    draw: int = 0
    block_size: int = 32
    tool_ttl_s: float | None = 60.0
    wait_ttl_s: float | None = 0.0
    arms: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a job: figures by name, and each arm's report."""

    job: Job
    figures: dict[str, float]
    arms: dict[str, dict[str, float]]
    num_requests: int
    input_tokens: int


def run_jobs(jobs: Sequence[Job], num_processes: int) -> list[Outcome]:
    """Results in the order of ``jobs``."""
    if num_processes == 1:
        return list(map(run_job, jobs))
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(run_job, jobs))


def run_job(job: Job) -> Outcome:
    """Replays one draw under all its arms."""
    import dataclasses

    from benchmarks.trace_replay.arms import Setting, report, run_arms
    from benchmarks.trace_replay.figures import figures
    from benchmarks.trace_replay.hints import HintRules
    from benchmarks.trace_replay.records import ServiceModel
    from benchmarks.trace_replay.workload import jittered

    workload = _workload(job)
    if job.draw:
        workload = jittered(workload, job.draw)
    is_open_loop = job.kind == "conversation"
    setting = Setting(
        workload=workload,
        gpu_tokens=job.gpu_tokens,
        host_ratio=job.host_ratio,
        rules=HintRules(tool_ttl_s=job.tool_ttl_s, wait_ttl_s=job.wait_ttl_s),
        service=ServiceModel.instant() if is_open_loop else ServiceModel(),
    )
    replays = run_arms(setting, job.arms)
    return Outcome(
        job=job,
        figures=figures(setting, replays),
        arms={
            name: dataclasses.asdict(report(replay)) for name, replay in replays.items()
        },
        num_requests=len(workload.turns),
        input_tokens=sum(turn.input_tokens for turn in workload.turns),
    )


def _workload(job: Job):  # type: ignore[no-untyped-def]
    from benchmarks.demo.workload import load_trace
    from benchmarks.trace_replay.conversation import read_conversation
    from benchmarks.trace_replay.direct import direct
    from benchmarks.trace_replay.workload import agents

    if job.kind == "direct":
        return direct(block_size=job.block_size)
    if job.kind == "conversation":
        return read_conversation(job.trace)
    return agents(load_trace(job.trace), block_size=job.block_size)
