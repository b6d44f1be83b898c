from __future__ import annotations

import asyncio

import pytest

from benchmarks.agent_serving.rates import NUM_PROMPT_TOKENS, measure_rates
from benchmarks.demo.client import Completion, DemoClient


class _Slow(DemoClient):
    """Computes 1,000 tokens a second and has a quarter of each prompt already."""

    def __init__(self) -> None:
        super().__init__("http://fake")
        self.prompts: list[list[int]] = []

    async def stream(
        self, prompt: list[int], num_output_tokens: int, hint: object
    ) -> Completion:
        self.prompts.append(prompt)
        cached = len(prompt) // 4
        ttft_s = (len(prompt) - cached) / 1000
        return Completion(
            ttft_s=ttft_s,
            latency_s=ttft_s + 0.05 * (num_output_tokens - 1),
            prompt_tokens=len(prompt),
            cached_tokens=cached,
            completion_tokens=num_output_tokens,
        )


def test_rates_are_those_of_what_was_computed() -> None:
    client = _Slow()
    rates = asyncio.run(measure_rates(client, 1024))
    assert rates.prefill_tokens_per_s == pytest.approx(1000)
    assert rates.decode_step_s == pytest.approx(0.05)


def test_no_prompt_is_sent_twice() -> None:
    client = _Slow()
    asyncio.run(measure_rates(client, 1024))
    assert {len(prompt) for prompt in client.prompts} == {NUM_PROMPT_TOKENS}
    assert len({prompt[0:8].__repr__() for prompt in client.prompts}) == 3
