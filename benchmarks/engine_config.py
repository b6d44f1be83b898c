"""Configurations of an engine that is never started: no weights, no devices."""

from __future__ import annotations

import atexit
import copy
import functools
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

VOCAB_SIZE = 32_000

#: Short names for ``make_scheduler``: connector class and the module that has it.
CONNECTORS: dict[str, tuple[str, str]] = {
    "null": ("NullConnector", "benchmarks.null_connector"),
    "sam": ("SAMConnector", "sam_connector"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The KV cache of the model that is not there.

    Attributes:
        num_layers: layers of each group; one number for each stage of a pipeline.
        num_full_groups: groups of full attention, each with its own block table.
        sliding_window: adds a group with this window in tokens.
        mla: the full groups hold latents, one vector a token, instead of keys and
            values.
        num_kv_heads: of a layer on one rank.
        head_size: in elements of four bytes; even for latents.
        layout: one of vLLM's ``KVCacheLayout``: ``LBNHC`` gives each layer its own
            region, ``BLNHC`` packs all layers of a block together, ``LHBNC`` gives
            each head of a layer its own region.
    """

    num_layers: int | tuple[int, ...] = 2
    num_full_groups: int = 1
    sliding_window: int | None = None
    mla: bool = False
    num_kv_heads: int = 1
    head_size: int = 2
    layout: str = "LBNHC"


@functools.cache
def _model_folder() -> Path:
    """A model folder that holds a configuration and no weights."""
    folder = Path(tempfile.mkdtemp(prefix="sam-tiny-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 1_048_576,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def vllm_config(
    *,
    connector: str | tuple[str, str] | None,
    block_size: int,
    async_scheduling: bool,
    extra_config: dict[str, Any],
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
) -> VllmConfig:
    model = str(_model_folder())
    config = VllmConfig(
        model_config=ModelConfig(
            model=model,
            tokenizer=model,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=max_model_len,
            seed=0,
        ),
        cache_config=CacheConfig(
            block_size=block_size, enable_prefix_caching=True, cache_dtype="auto"
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=_kv_transfer_config(connector, extra_config),
    )
    # The CPU platform rewrites these two: it forces the switch off and may round
    # the block size, and neither limit concerns a scheduler without a device.
    config.scheduler_config.async_scheduling = async_scheduling
    config.cache_config.block_size = block_size
    # Set afterwards, since the platform would look for that many devices.
    parallel = config.parallel_config
    parallel.tensor_parallel_size = tensor_parallel_size
    parallel.pipeline_parallel_size = pipeline_parallel_size
    parallel.world_size = tensor_parallel_size * pipeline_parallel_size
    return config


def _kv_transfer_config(
    connector: str | tuple[str, str] | None, extra_config: dict[str, Any]
) -> KVTransferConfig | None:
    if connector is None:
        return None
    name, module_path = (
        CONNECTORS[connector] if isinstance(connector, str) else connector
    )
    return KVTransferConfig(
        kv_connector=name,
        kv_connector_module_path=module_path,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=extra_config,
    )


def kv_cache_config(
    config: VllmConfig, num_blocks: int, shape: KVShape, stage: int = 0
) -> KVCacheConfig:
    """Groups of layers and where their blocks lie, as the engine core plans them.

    Args:
        config: of the engine.
        num_blocks: blocks of the pool, the null block included.
        shape: of the KV cache.
        stage: of the pipeline; the scheduler's is the first.
    """
    cache = copy.copy(config.cache_config)
    cache.kv_cache_layout = shape.layout
    cache.num_gpu_blocks_override = num_blocks
    planned = copy.copy(config)
    planned.cache_config = cache
    specs = _group_specs(shape, cache.block_size)
    num_layers = shape.num_layers
    if isinstance(num_layers, int):
        num_layers = (num_layers,) * (stage + 1)
    first = sum(num_layers[:stage]) * len(specs)
    groups = [
        KVCacheGroupSpec(
            [
                f"layer.{first + group_id + i * len(specs)}"
                for i in range(num_layers[stage])
            ],
            spec,
        )
        for group_id, spec in enumerate(specs)
    ]
    planned_cache = get_kv_cache_config_from_groups(planned, groups, 0)
    planned_cache.kv_cache_layout = shape.layout
    return planned_cache


def _group_specs(shape: KVShape, block_size: int) -> list[AttentionSpec]:
    dims: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": shape.num_kv_heads,
        "head_size": shape.head_size,
        "dtype": torch.float32,
    }
    full = MLAAttentionSpec if shape.mla else FullAttentionSpec
    specs: list[AttentionSpec] = [full(**dims) for _ in range(shape.num_full_groups)]
    if shape.sliding_window is not None:
        window = SlidingWindowSpec(**dims, sliding_window=shape.sliding_window)
        specs.append(window)
    return specs
