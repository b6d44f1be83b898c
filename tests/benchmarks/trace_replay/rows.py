"""Small traces for tests."""

from __future__ import annotations

from benchmarks.trace_replay.workload import TraceRow, Workload, build_workload

BLOCK_SIZE = 16


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
    return build_workload(ordered, block_size=BLOCK_SIZE)


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
