"""The parts of vLLM that a replay runs on."""

from __future__ import annotations

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request

from benchmarks.trace_replay.workload import Turn


def make_request(turn: Turn) -> Request:
    """A turn as the engine sees it; no session is named yet."""
    context = turn.context

    def known_hashes(request: Request) -> list[BlockHash]:
        # Hashed once per context, with vLLM's function, for all runs.
        num_full = request.num_tokens // context.block_size
        return context.block_hashes[len(request.block_hashes) : num_full]

    return Request(
        request_id=f"{turn.session}#{turn.index}",
        prompt_token_ids=context.token_ids[: turn.input_tokens],
        sampling_params=SamplingParams(
            max_tokens=turn.output_tokens, ignore_eos=True, temperature=0.0
        ),
        pooling_params=None,
        arrival_time=0.0,
        block_hasher=known_hashes,
    )


def make_kv_cache_manager(
    num_blocks: int, block_size: int, max_model_len: int
) -> KVCacheManager:
    """The real cache manager over blocks that no memory stands behind."""
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return KVCacheManager(
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)],
        ),
        max_model_len=max_model_len,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
        enable_caching=True,
    )
