"""The parts of vLLM that a replay runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from benchmarks.engine_config import KVShape, kv_cache_config, vllm_config
from benchmarks.trace_replay.workload import Turn

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

#: 128 KiB a token, as the 8B model has that the service times are those of.
SHAPE = KVShape(num_layers=16, num_kv_heads=8, head_size=128)


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


def engine_config(
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    *,
    connector: str | None = None,
    extra_config: dict[str, Any] | None = None,
) -> tuple[VllmConfig, KVCacheConfig]:
    """Configurations of an engine with a pool of ``num_blocks``."""
    config = vllm_config(
        connector=connector,
        block_size=block_size,
        async_scheduling=False,
        extra_config=extra_config or {},
        max_model_len=max_model_len,
        max_num_seqs=256,
        max_num_batched_tokens=8_192,
    )
    return config, kv_cache_config(config, num_blocks, SHAPE)


def make_kv_cache_manager(
    kv_cache_config: KVCacheConfig, block_size: int, max_model_len: int
) -> KVCacheManager:
    """The real cache manager over blocks that no memory stands behind."""
    return KVCacheManager(
        kv_cache_config=kv_cache_config,
        max_model_len=max_model_len,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
        enable_caching=True,
    )
