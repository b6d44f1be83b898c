"""Configurations of an engine that is never started: no weights, no devices."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
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
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

VOCAB_SIZE = 32_000

#: Short names for ``make_scheduler``: connector class and the module that has it.
CONNECTORS: dict[str, tuple[str, str]] = {
    "null": ("NullConnector", "benchmarks.null_connector"),
    "sam": ("SAMConnector", "sam_connector"),
}


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
    num_blocks: int, block_size: int, sliding_window: int | None
) -> KVCacheConfig:
    shape: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    groups = [KVCacheGroupSpec(["layer.0"], FullAttentionSpec(**shape))]
    if sliding_window is not None:
        spec = SlidingWindowSpec(**shape, sliding_window=sliding_window)
        groups.append(KVCacheGroupSpec(["layer.1"], spec))
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
    )
