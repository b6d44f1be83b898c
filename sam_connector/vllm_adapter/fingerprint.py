"""What determines the bytes of a block besides its content.

Two engines with the same fingerprint may read each other's blocks. What it does not
cover because nothing tells a connector is the weights themselves: with other weights
under the same name and revision the operator sets ``store_namespace``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sam_connector.core.types import GroupId
from sam_connector.vllm_adapter.geometry import region_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

#: Of our own slots; raised when their layout changes.
_SLOT_FORMAT = 1

#: vLLM seeds these at random in every process, since they are not collision resistant.
_SEEDED_AT_RANDOM = "xxhash"


def fingerprint(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    *,
    namespace: str,
    blocks_per_value: Mapping[GroupId, int],
) -> str:
    """32 hexadecimal digits.

    Args:
        vllm_config: the engine's.
        kv_cache_config: geometry of its cache.
        namespace: the operator's own part.
        blocks_per_value: how blocks are grouped in the store.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    parts: dict[str, Any] = {
        "slot_format": _SLOT_FORMAT,
        "namespace": namespace,
        "model": model.model,
        "revision": str(model.revision),
        "architecture": _architecture(model),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "hash": [str(cache.prefix_caching_hash_algo), _hash_seed(cache)],
        "ranks": [
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.world_size,
        ],
        "groups": [
            [repr(group.kv_cache_spec), sorted(group.layer_names)]
            for group in kv_cache_config.kv_cache_groups
        ],
        "regions": {
            int(group_id): [[spec.layer, spec.block_bytes] for spec in specs]
            for group_id, specs in region_specs(kv_cache_config).items()
        },
        "blocks_per_value": {int(g): size for g, size in blocks_per_value.items()},
    }
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _architecture(model: Any) -> str:
    """All that the model's own configuration says, e.g. how positions are encoded."""
    config = model.hf_config
    to_dict = getattr(config, "to_dict", None)
    return json.dumps(to_dict() if to_dict else {}, sort_keys=True, default=str)


def _hash_seed(cache: Any) -> str:
    """What vLLM's block hashes begin with."""
    seed = os.getenv("PYTHONHASHSEED")
    if seed is not None:
        return seed
    if str(cache.prefix_caching_hash_algo).startswith(_SEEDED_AT_RANDOM):
        logger.warning(
            "what this engine stores no other will find: block hashes begin with a "
            "random seed for --prefix-caching-hash-algo %s; use sha256, or set "
            "PYTHONHASHSEED to the same value everywhere",
            cache.prefix_caching_hash_algo,
        )
        return uuid.uuid4().hex
    return ""
