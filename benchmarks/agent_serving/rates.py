"""How fast the engine is on this machine when it serves one request alone.

A model of a server needs both numbers to be compared with this one.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from benchmarks.demo.client import DemoClient

NUM_PROMPT_TOKENS = 1024
_NUM_OUTPUT_TOKENS = 17
_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Medians of a few requests, one at a time."""

    prefill_tokens_per_s: float
    decode_step_s: float


async def measure_rates(client: DemoClient, vocab_size: int) -> Rates:
    """Ask an idle server for prompts that it cannot have in any cache."""
    prefill, decode = [], []
    for repeat in range(_REPEATS):
        draw = random.Random(f"rates {repeat}")
        prompt = draw.choices(range(8, vocab_size), k=NUM_PROMPT_TOKENS)
        done = await client.stream(prompt, _NUM_OUTPUT_TOKENS, None)
        computed = done.prompt_tokens - done.cached_tokens
        prefill.append(computed / done.ttft_s)
        decode.append((done.latency_s - done.ttft_s) / (done.completion_tokens - 1))
    return Rates(
        prefill_tokens_per_s=round(statistics.median(prefill), 1),
        decode_step_s=round(statistics.median(decode), 5),
    )
