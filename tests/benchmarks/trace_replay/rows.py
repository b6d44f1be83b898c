"""Small traces for tests."""

from __future__ import annotations

from benchmarks.demo.workload import TraceRow
from benchmarks.trace_replay.records import ServiceModel
from benchmarks.trace_replay.workload import Workload, agents

BLOCK_SIZE = 16

#: One second per 1,000 tokens of prefill, one second per step of decoding, ten blocks
#: of the model that the service times are those of a second over the link.
SERVICE = ServiceModel(
    prefill_tokens_per_s=1_000.0,
    max_batched_tokens=1_000_000,
    decode_step_s=1.0,
    decode_request_s=0.0,
    decode_context_token_s=0.0,
    link_bytes_per_s=10 * 16 * (128 << 10),
    copy_slowdown=0.0,
    idle_step_s=0.5,
    growth_tokens=32,
)


def row(
    session: str,
    start_s: float,
    end_s: float,
    input_tokens: int,
    output_tokens: int = 16,
    parent: str | None = None,
) -> TraceRow:
    return TraceRow(
        session=session,
        parent=parent,
        start_s=start_s,
        end_s=end_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
    )


def workload(*rows: TraceRow) -> Workload:
    ordered = sorted(rows, key=lambda r: r.start_s)
    return agents(ordered, block_size=BLOCK_SIZE)


def ring(num_sessions: int, num_turns: int, *, first_tokens: int) -> Workload:
    """Sessions that take turns, each growing by 64 tokens a turn.

    With a pool that holds all but one of them LRU evicts what is needed next.
    """
    return workload(
        *(
            row(
                f"s{session}",
                turn * 100.0 + session * 10.0,
                turn * 100.0 + session * 10.0 + 1.0,
                first_tokens + 64 * turn,
            )
            for session in range(num_sessions)
            for turn in range(num_turns)
        )
    )
