from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from dataclasses import replace

from benchmarks.trace_replay.compute import Compute
from benchmarks.trace_replay.records import ServiceModel
from tests.benchmarks.trace_replay.rows import SERVICE

pytestmark = pytest.mark.vllm


class Bench:
    """Runs a ``Compute`` and notes when what is done."""

    def __init__(self, service: ServiceModel = SERVICE) -> None:
        self.compute = Compute(service)
        self.now_s = 0.0
        self.done: dict[str, float] = {}

    def prefill(self, name: str, num_tokens: int) -> None:
        self.compute.prefill(num_tokens, lambda: self._note(name))

    def decode(self, name: str, num_steps: int, context_tokens: int = 0) -> None:
        self.compute.decode(
            num_steps, lambda: self._note(name), context_tokens=context_tokens
        )

    def run(self, seconds: float = 1e9) -> dict[str, float]:
        """Until nothing is left to do, or ``seconds`` are over."""
        while (wait_s := self.compute.time_to_next()) <= seconds:
            self._advance(wait_s, is_next=True)
            seconds -= wait_s
        if seconds < 1e8:
            self._advance(seconds, is_next=False)
        return {name: round(at_s, 4) for name, at_s in self.done.items()}

    def _advance(self, wait_s: float, *, is_next: bool) -> None:
        self.compute.advance(wait_s, is_next=is_next)
        self.now_s += wait_s
        for then in self.compute.take_due():
            then()

    def _note(self, name: str) -> None:
        self.done[name] = self.now_s


def test_prefills_wait_for_each_other() -> None:
    bench = Bench()
    bench.prefill("a", 2_000)
    bench.prefill("b", 1_000)
    assert bench.compute.prefill_tokens == 3_000
    assert bench.run() == {"a": 2.0, "b": 3.0}


def test_decodes_run_side_by_side() -> None:
    bench = Bench()
    bench.decode("a", 5)
    bench.decode("b", 3)
    assert bench.run() == {"a": 5.0, "b": 3.0}


def test_a_prefill_delays_decoding_by_what_its_tokens_take() -> None:
    bench = Bench(replace(SERVICE, max_batched_tokens=101))
    bench.decode("decoding", 20)
    bench.run(4.0)
    bench.prefill("prompt", 1_000)
    # Ten chunks of 100, a decode step with each of them.
    assert bench.run() == {"prompt": 15.0, "decoding": 21.0}


def test_a_step_grows_with_requests_and_their_contexts() -> None:
    service = replace(SERVICE, decode_request_s=0.5, decode_context_token_s=0.001)
    bench = Bench(service)
    bench.decode("a", 1, context_tokens=1_000)
    assert bench.compute.step_s == pytest.approx(2.0)
    bench.decode("b", 1, context_tokens=500)
    assert bench.compute.step_s == pytest.approx(3.0)


def test_a_busy_link_slows_decoding() -> None:
    bench = Bench(replace(SERVICE, copy_slowdown=0.1))
    bench.decode("a", 1)
    bench.compute.busy_directions = 2
    assert bench.run() == {"a": 1.2}


def test_what_is_cancelled_is_not_done_and_costs_nothing() -> None:
    bench = Bench(replace(SERVICE, decode_context_token_s=0.001))
    decode = bench.compute.decode(9, lambda: pytest.fail("done"), context_tokens=1_000)
    prefill = bench.compute.prefill(9, lambda: pytest.fail("done"))
    bench.decode("a", 2)
    bench.compute.cancel(decode)
    bench.compute.cancel(prefill)
    assert bench.run() == {"a": 2.0}


def test_where_nothing_takes_time_all_is_done_at_once() -> None:
    bench = Bench(ServiceModel.instant())
    bench.prefill("a", 100_000)
    bench.decode("b", 1_000)
    assert bench.run() == {"a": 0.0, "b": 0.0}
