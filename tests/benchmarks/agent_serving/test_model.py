from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from benchmarks.agent_serving.model import ARMS, agrees, modelled_ttft
from benchmarks.agent_serving.rates import Rates
from benchmarks.agent_serving.scenario import scenario

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(60)]


def test_the_model_runs_what_the_servers_run() -> None:
    rates = Rates(prefill_tokens_per_s=2_500.0, decode_step_s=0.02)
    found = modelled_ttft(scenario(60), rates)
    assert set(found) == set(ARMS)
    assert found["hints"] < found["stock"]


def test_servers_that_differ_must_be_in_the_model_s_order() -> None:
    live = {"a": 1.0, "b": 1.05, "c": 2.0}
    assert agrees({"a": 3.0, "b": 2.0, "c": 4.0}, live)
    assert not agrees({"a": 3.0, "b": 5.0, "c": 4.0}, live)
