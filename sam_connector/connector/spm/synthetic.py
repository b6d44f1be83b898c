"""Requests that only the inner connector knows: how it is told to load or save."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.request import Request

from sam_connector.connector.spm.metadata import REQUEST_PREFIX
from sam_connector.connector.spm.sequences import TokenSequence

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput

#: Connectors leave a last token to compute, some of them twice over.
_NUM_TAIL = 2


def make_request(number: int, sequence: TokenSequence, num_blocks: int) -> Request:
    """A request whose prompt is the first blocks of a sequence, and a bit.

    Args:
        number: tells requests apart.
        sequence: what it is of.
        num_blocks: how much of it; no connector finds more of the prompt.
    """
    num_tokens = num_blocks * sequence.block_size
    prompt = [*sequence.tokens[:num_tokens], *[0] * _NUM_TAIL]
    request = Request(
        request_id=f"{REQUEST_PREFIX}{number}",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=sequence.lora_request,
        cache_salt=sequence.cache_salt,
    )
    request.block_hashes.extend(sequence.hashes[:num_blocks])  # type: ignore[arg-type]
    return request


def as_blocks(blocks: Sequence[KVCacheBlock]) -> KVCacheBlocks:
    return KVCacheBlocks((list(blocks),))


def scheduled(request: Request, blocks: Iterable[KVCacheBlock]) -> NewRequestData:
    """The request as if it had been admitted with these blocks in this step."""
    return NewRequestData.from_request(request, ([b.block_id for b in blocks],))


def inner_view(
    scheduler_output: SchedulerOutput,
    *,
    added: Sequence[NewRequestData],
    hidden: Collection[str],
    ended: Collection[str],
) -> Any:
    """A step as the inner connector is to see it; the engine's is not changed.

    Args:
        scheduler_output: the step.
        added: requests of ours that begin in it.
        hidden: requests that the inner connector must not hear of.
        ended: requests of ours that have ended.
    """
    if not (added or hidden or ended):
        return scheduler_output
    view = copy.copy(scheduler_output)
    view.scheduled_new_reqs = [
        data for data in view.scheduled_new_reqs if data.req_id not in hidden
    ]
    view.scheduled_new_reqs += added
    counts = dict(view.num_scheduled_tokens)
    for request_id in hidden:
        counts.pop(request_id, None)
    for data in added:
        counts[data.req_id] = data.prompt_len - data.num_computed_tokens
    view.num_scheduled_tokens = counts
    view.finished_req_ids = view.finished_req_ids | set(ended)
    return view
