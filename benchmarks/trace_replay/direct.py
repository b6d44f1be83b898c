"""The RFC's test without an agent framework: 20 sessions, 5 requests at a time."""

from __future__ import annotations

from benchmarks.demo.workload import Next
from benchmarks.trace_replay.workload import Context, Turn, Workload, fill

NUM_SESSIONS = 20
NUM_CONCURRENT = 5
#: Of the inputs of a session, one after the other; the RFC says 10 to 30K.
INPUT_TOKENS = (10_000, 15_000, 20_000, 25_000, 30_000)
OUTPUT_TOKENS = 200
#: Half of what the sessions come to in the end.
POOL_TOKENS = 300_000


def direct(*, block_size: int) -> Workload:
    """Sessions take turns; a request starts as soon as one of the five has ended."""
    contexts = [Context(f"direct-{i}") for i in range(NUM_SESSIONS)]
    turns = []
    for round_, input_tokens in enumerate(INPUT_TOKENS):
        for number, context in enumerate(contexts):
            index = round_ * NUM_SESSIONS + number
            awaited = (index - NUM_SESSIONS, index - NUM_CONCURRENT)
            is_last = round_ == len(INPUT_TOKENS) - 1
            turns.append(
                Turn(
                    index=index,
                    session=context.name,
                    input_tokens=input_tokens,
                    output_tokens=OUTPUT_TOKENS,
                    context=context,
                    wait_for=tuple(i for i in awaited if i >= 0),
                    gap_s=0.0,
                    next=Next.END if is_last else Next.TOOL,
                )
            )
    return fill(turns, block_size)
