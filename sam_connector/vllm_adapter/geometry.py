"""What the KV cache of an engine looks like, and whether a tier can hold it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from sam_connector.core.types import GroupId

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import (
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSpec:
    """One run of equal-sized pieces in an allocation, one piece per block.

    Attributes:
        layer: a layer whose registered tensor lies in the allocation.
        start: of block 0, in bytes from the start of the allocation.
        stride: bytes from one block to the next.
        block_bytes: size of a block's piece.
    """

    layer: str
    start: int
    stride: int
    block_bytes: int


def region_specs(
    kv_cache_config: KVCacheConfig,
) -> dict[GroupId, tuple[RegionSpec, ...]]:
    """Where the blocks of each KV cache group are, from the engine's own placement.

    Groups may overlay each other: a block id belongs to one of them at a time.
    """
    return {
        GroupId(group_id): tuple(
            spec
            for tensor in kv_cache_config.kv_cache_tensors
            if not set(tensor.layers).isdisjoint(group.layer_names)
            for spec in _regions_of(
                tensor, _page_bytes(group, tensor), kv_cache_config.num_blocks
            )
        )
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
    }


def _page_bytes(group: KVCacheGroupSpec, tensor: KVCacheTensor) -> int:
    """Size of one block of one layer; a tensor's layers are all alike."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.kv_cache_specs[tensor.layers[0]]
    return spec.page_size_bytes


def _regions_of(
    tensor: KVCacheTensor, page_bytes: int, num_blocks: int
) -> list[RegionSpec]:
    """Regions of equally shaped layers.

    Either each layer (or each group of its heads) has a region of its own, or a
    block has the pages of all layers side by side, and then it is one piece.
    """
    stride = tensor.block_stride
    span = num_blocks * stride
    if tensor.layer_stride < span:
        return [
            RegionSpec(
                layer=tensor.layers[0],
                start=tensor.offset,
                stride=stride,
                block_bytes=page_bytes * len(tensor.layers),
            )
        ]
    per_layer = tensor.layer_stride // span
    return [
        RegionSpec(
            layer=layer,
            start=tensor.offset + index * tensor.layer_stride + part * span,
            stride=stride,
            block_bytes=stride,
        )
        for index, layer in enumerate(tensor.layers)
        for part in range(per_layer)
    ]


def record_bytes(specs: Iterable[RegionSpec]) -> int:
    """Size of one block of a group on one rank."""
    return sum(spec.block_bytes for spec in specs)


def why_not_holdable(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_cache_manager: KVCacheManager | None = None,
) -> str | None:
    """Why a tier cannot hold this model's cache; ``None`` if it can.

    Loading must restore *every* group of a prefix: full attention alone would leave
    a sliding window or a recurrent state behind it empty.
    """
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        return "decode context parallelism is not supported"
    for group in kv_cache_config.kv_cache_groups:
        for spec in _flat(group.kv_cache_spec):
            # Not subclasses: they give blocks back, or keep other state in them.
            if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
                return f"it has a KV cache group of kind {type(spec).__name__}"
    if any(tensor.host_resident for tensor in kv_cache_config.kv_cache_tensors):
        return "a part of its KV cache lies in host memory already"
    if not all(region_specs(kv_cache_config).values()):
        return "the engine does not say where its KV cache lies"
    if kv_cache_manager is not None:
        managers = kv_cache_manager.coordinator.single_type_managers
        if any(m.block_pool is not kv_cache_manager.block_pool for m in managers):
            return "a KV cache group has a block pool of its own"
    return None


def _flat(spec: KVCacheSpec) -> list[KVCacheSpec]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]
