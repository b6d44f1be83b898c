"""The same workload on the server in virtual time of ``benchmarks.trace_replay``.

What that model says of policies is worth something if it puts them in the order in
which real servers do.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from benchmarks.agent_serving.rates import Rates
from benchmarks.agent_serving.scenario import Scenario
from benchmarks.trace_replay.arms import Setting, mean_ttft, run_arms
from benchmarks.trace_replay.hints import HintRules
from benchmarks.trace_replay.records import ServiceModel
from benchmarks.trace_replay.workload import of_plan

#: The model's arms by what the live servers are called.
ARMS = {"stock": "lru", "tier": "plain_tier", "hints": "tier", "wrong": "wrong"}

#: Copies between two places in memory, by threads that also compute.
_COPY_BYTES_PER_S = 2e9

#: Live servers that differ by less are equal for all that can be told.
_TELLING_RATIO = 1.10


def modelled_ttft(planned: Scenario, rates: Rates) -> dict[str, float]:
    """Mean TTFT by the model, under the names of the live servers."""
    token_bytes = planned.block_bytes / planned.block_size
    model_bytes = ServiceModel().kv_bytes_per_token
    service = ServiceModel(
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        decode_step_s=rates.decode_step_s,
        decode_request_s=0.0,
        decode_context_token_s=0.0,
        # The model's tokens are larger, so its link is faster.
        link_bytes_per_s=_COPY_BYTES_PER_S * model_bytes / token_bytes,
    )
    setting = Setting(
        workload=of_plan(planned.workload, block_size=planned.block_size),
        gpu_tokens=planned.pool_tokens,
        host_ratio=planned.host_tokens / planned.pool_tokens,
        rules=HintRules(keep_template=False),
        service=service,
    )
    replays = run_arms(setting, tuple(ARMS.values()))
    return {kind: round(mean_ttft(replays[arm]), 4) for kind, arm in ARMS.items()}


def agrees(modelled: Mapping[str, float], live: Mapping[str, float]) -> bool:
    """Whether no two servers that differ are the other way round in the model."""
    return all(
        (modelled[one] < modelled[other]) == (live[one] < live[other])
        for one, other in itertools.combinations(modelled, 2)
        if max(live[one], live[other]) > _TELLING_RATIO * min(live[one], live[other])
    )
