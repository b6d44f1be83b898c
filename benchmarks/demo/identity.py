"""Do hints change tokens? The same requests, one at a time, on both servers.

One at a time, because what shares a batch changes floating-point sums and with them
tokens on any server. The pool is far smaller than what these requests hold
together, so blocks are evicted and reused all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.demo.client import DemoClient
from benchmarks.demo.policy import after_turn, request_hint
from benchmarks.demo.workload import Turn, Workload

#: The trace's own outputs are a few tokens once scaled; more tokens compare more.
NUM_OUTPUT_TOKENS = 12


async def generate_one_by_one(
    client: DemoClient,
    workload: Workload,
    turns: Sequence[Turn],
    *,
    hints: bool,
    report: Callable[[str], None],
) -> dict[int, list[int]]:
    """Generated token ids by turn index."""
    tokens: dict[int, list[int]] = {}
    cached = 0
    for turn in turns:
        hint = request_hint(turn, "identity") if hints else None
        tokens[turn.index], done = await client.generate(
            workload.prompt(turn), NUM_OUTPUT_TOKENS, hint
        )
        cached += done.cached_tokens
        call = after_turn(turn, "identity") if hints else None
        if call is not None:
            await client.control(call)
        if len(tokens) % 10 == 0:
            report(f"identity {len(tokens)}/{len(turns)}, {cached} tokens from cache")
    return tokens
