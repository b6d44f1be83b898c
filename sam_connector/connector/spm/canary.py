"""Proof that a load has written the blocks it was given.

A connector that was handed a request of ours may decide to do nothing, and say that
it has loaded. Bytes that were not written must never get a hash: so each block is
marked before, at its start and its end in every layer, and looked at afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

#: Elements of a mark. Even for elements of one byte, chance does not repeat them.
_LENGTH = 8
#: Finite in every format, so that what is left of a mark does no harm.
_VALUES = tuple(float(17 + 13 * i) for i in range(_LENGTH))


class Canary:
    """Marks blocks of one rank's KV cache.

    Args:
        kv_caches: by layer; the first dimension counts blocks, or parts of blocks.
        num_blocks: of the cache.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        self._layers = list(kv_caches.values())
        self._num_blocks = num_blocks
        self._marks: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    @property
    def can_mark(self) -> bool:
        """Whether it is known where the blocks of every layer are."""
        return bool(self._layers) and all(
            layer.dim() > 1
            and layer.shape[0] % self._num_blocks == 0
            and layer[0].numel() >= 2 * _LENGTH
            and layer.shape[-1] > 0
            for layer in self._layers
        )

    def mark(self, block_ids: Sequence[int]) -> None:
        for layer in self._layers:
            for row in self._ends(layer, block_ids):
                row.copy_(self._mark(layer)[: row.numel()].view_as(row))
            if layer.is_cuda:
                # A load on another stream must not be overtaken by its own mark.
                torch.cuda.current_stream(layer.device).synchronize()

    def num_untouched(self, block_ids: Sequence[int]) -> int:
        """Marks that are still there."""
        found = 0
        for layer in self._layers:
            for row in self._ends(layer, block_ids):
                found += bool(
                    torch.equal(row.reshape(-1), self._mark(layer)[: row.numel()])
                )
        return found

    def _ends(
        self, layer: torch.Tensor, block_ids: Sequence[int]
    ) -> list[torch.Tensor]:
        """First and last elements of each block, as views."""
        parts = layer.shape[0] // self._num_blocks
        ends = []
        for block_id in block_ids:
            first, last = layer[block_id * parts], layer[(block_id + 1) * parts - 1]
            while first.dim() > 1:
                first, last = first[0], last[-1]
            ends += [first[:_LENGTH], last[-_LENGTH:]]
        return ends

    def _mark(self, layer: torch.Tensor) -> torch.Tensor:
        key = layer.dtype, layer.device
        if key not in self._marks:
            values = torch.tensor(_VALUES, device=layer.device)
            self._marks[key] = values.to(layer.dtype)
        return self._marks[key]
