"""A model whose only product is its KV cache, and which notices a wrong one.

What it writes at a position is a function of the tokens up to there, the layer, the
head and the rank, so that the content of a full block follows from its block hash.
In every step it compares everything that a request attends to with what it would have
written there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from benchmarks.scheduler_harness import sampled_token

Words = NDArray[np.uint64]

#: What a block holds before anything was written, and after it was scrambled.
GARBAGE = 0xA5


def mixed(values: Words) -> Words:
    """Spreads every bit of each value over all of it."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def prefix_marks(tokens: Sequence[int], first: int, before: int, seed: int) -> Words:
    """One mark per position, which depends on all tokens up to it.

    Args:
        tokens: those from position ``first`` on.
        first: their first position.
        before: the mark of the position before; 0 if there is none.
        seed: sets apart what computes different values from the same tokens.
    """
    positions = np.arange(first, first + len(tokens), dtype=np.uint64)
    values = np.asarray(tokens, dtype=np.uint64) + (positions << np.uint64(32))
    values = mixed(values ^ mixed(np.array([seed], dtype=np.uint64)))
    return np.cumsum(values, dtype=np.uint64) + np.uint64(before)


@dataclass(slots=True)
class Layer:
    """One layer's KV cache on one rank.

    Attributes:
        blocks: its memory as ``[block, head, token, word]``, however it lies.
        salt: sets its values apart, per head and word.
    """

    name: str
    group_id: int
    blocks: Words
    salt: Words

    def values(self, marks: Words) -> Words:
        """What the layer holds at positions with these marks."""
        return mixed(marks[..., None, None] + self.salt)

    def read(self, block_ids: Iterable[int]) -> Words:
        """Content of blocks, as ``[block, token, head, word]``."""
        return self.blocks[list(block_ids)].transpose(0, 2, 1, 3)


@dataclass(slots=True)
class Row:
    """A request in the batch of a worker."""

    request_id: str
    prompt: list[int]
    block_ids: list[list[int]]
    seed: int
    marks: Words = field(default_factory=lambda: np.empty(0, np.uint64))
    expected: dict[str, Words] = field(default_factory=dict)

    def extend(self, num_tokens: int, layers: Iterable[Layer]) -> None:
        """Knows what each layer holds for the first ``num_tokens`` positions."""
        first = len(self.marks)
        if first >= num_tokens:
            return
        tokens = [self._token(position) for position in range(first, num_tokens)]
        before = int(self.marks[-1]) if first else 0
        marks = prefix_marks(tokens, first, before, self.seed)
        self.marks = np.concatenate([self.marks, marks])
        for layer in layers:
            values = [self.expected[layer.name]] if first else []
            self.expected[layer.name] = np.concatenate([*values, layer.values(marks)])

    def _token(self, position: int) -> int:
        if position < len(self.prompt):
            return self.prompt[position]
        return sampled_token(self.request_id, position)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one request that one step computes."""

    row: Row
    start: int
    end: int


class RankModel:
    """KV cache memory and block tables of one rank.

    Args:
        config: where the rank's layers lie.
        rank: whose values it writes.

    Attributes:
        kv_caches: what a worker registers, by layer name.
        rows: requests it knows, by id.
        weights: version of the weights; values differ from one to the next.
    """

    def __init__(self, config: KVCacheConfig, rank: int) -> None:
        self.config = config
        self.rank = rank
        self.weights = 0
        self.rows: dict[str, Row] = {}
        assert config.kv_cache_layout is not None
        self.kv_caches: dict[str, torch.Tensor] = allocate_kv_cache(
            config, torch.device("cpu"), KVCacheLayout[config.kv_cache_layout]
        )
        some = next(iter(self.kv_caches.values()))
        self._memory = np.asarray(
            torch.empty(0, dtype=torch.uint8).set_(some.untyped_storage())
        )
        self._memory[:] = GARBAGE
        self.layers = [
            _layer(name, group_id, self.kv_caches[name], rank)
            for group_id, group in enumerate(config.kv_cache_groups)
            for name in group.layer_names
        ]
        self.block_size = config.kv_cache_groups[0].kv_cache_spec.block_size

    def accept(self, scheduled: SchedulerOutput) -> list[Chunk]:
        """Follows what was scheduled, as a worker's batch does."""
        for request_id in scheduled.finished_req_ids:
            self.rows.pop(request_id, None)
        starts: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            lora_id = new.lora_request.lora_int_id if new.lora_request else 0
            self.rows[new.req_id] = Row(
                new.req_id,
                new.prompt_token_ids,
                [list(ids) for ids in new.block_ids],
                seed=(self.weights << 32) + lora_id,
            )
            starts[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for request_id, new_ids, num_computed in zip(
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            strict=True,
        ):
            self._update_blocks(request_id, new_ids, cached.resumed_req_ids)
            starts[request_id] = num_computed
        chunks = []
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            start = starts[request_id]
            row = self.rows[request_id]
            row.extend(start + num_tokens, self.layers)
            chunks.append(Chunk(row, start, start + num_tokens))
        return chunks

    def compute(self, chunks: Iterable[Chunk]) -> None:
        """Writes the new positions, then verifies all that each request attends to.

        In this order, since a request may hit blocks that another one fills in the
        same step: each layer of a model writes for all requests, then attends.

        Raises:
            AssertionError: a request would attend to wrong bytes.
        """
        chunks = list(chunks)
        for chunk in chunks:
            for layer in self.layers:
                self._write(chunk, layer)
        for chunk in chunks:
            for layer in self.layers:
                self._verify(chunk, layer)

    def page(self, block_id: int, layer_name: str) -> bytes:
        """Content of one layer's part of a block, ordered by token, head, word."""
        layer = next(layer for layer in self.layers if layer.name == layer_name)
        return layer.read([block_id]).tobytes()

    def scramble(self, block_ids: Iterable[int]) -> None:
        """Nothing may rely on what these blocks held."""
        ids = list(block_ids)
        for layer in self.layers:
            layer.blocks[ids] ^= np.uint64(0x5A5A5A5A5A5A5A5A)

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Lends the memory to a test; afterwards it is as it was."""
        before = self._memory.copy()
        try:
            yield
        finally:
            self._memory[:] = before

    def wrong_blocks(
        self, group_id: int, marks: Mapping[int, Words]
    ) -> Iterator[tuple[int, str]]:
        """Blocks (and a layer) that differ from what belongs to their marks."""
        ids = list(marks)
        if not ids:
            return
        stacked = np.stack(list(marks.values()))
        for layer in self.layers:
            if layer.group_id == group_id:
                wrong = (layer.read(ids) != layer.values(stacked)).any((1, 2, 3))
                yield from ((ids[i], layer.name) for i in np.flatnonzero(wrong))

    def reload_weights(self) -> None:
        """What is computed from now on differs from what was."""
        self.weights += 1
        for row in self.rows.values():
            row.seed += 1 << 32
            row.marks = np.empty(0, np.uint64)
            row.expected = {}

    def _update_blocks(
        self,
        request_id: str,
        new_ids: Sequence[Sequence[int]] | None,
        resumed: set[str],
    ) -> None:
        row = self.rows[request_id]
        if request_id in resumed:
            assert new_ids is not None
            row.block_ids = [list(ids) for ids in new_ids]
        elif new_ids is not None:
            for ids, more in zip(row.block_ids, new_ids, strict=True):
                ids.extend(more)

    def _verify(self, chunk: Chunk, layer: Layer) -> None:
        row, end = chunk.row, chunk.end
        attended_from = self._attended_from(layer.group_id, chunk.start)
        first_block = attended_from // self.block_size
        last_block = -(-end // self.block_size)
        start = first_block * self.block_size
        ids = row.block_ids[layer.group_id][first_block:last_block]
        where = f"of {layer.name} on rank {self.rank} for request {row.request_id}"
        assert len(ids) == last_block - first_block, (
            f"no block {last_block - 1} {where}"
        )
        assert 0 not in ids, f"the null block is block {ids.index(0)} {where}"
        held = layer.read(ids)
        held = held.reshape(-1, *held.shape[2:])[: end - start]
        wrong = (held != row.expected[layer.name][start:end]).any((1, 2))
        # The window may have left a part of the first block.
        wrong[: attended_from - start] = False
        if wrong.any():
            position = start + int(wrong.argmax())
            block_id = row.block_ids[layer.group_id][position // self.block_size]
            raise AssertionError(
                f"wrong bytes at position {position} {where}: block {block_id}, "
                f"{int(wrong.sum())} of {end} positions"
            )

    def _write(self, chunk: Chunk, layer: Layer) -> None:
        positions = np.arange(chunk.start, chunk.end)
        table = np.asarray(chunk.row.block_ids[layer.group_id])
        ids = table[positions // self.block_size]
        assert ids.all(), f"{chunk.row.request_id} would write to the null block"
        values = chunk.row.expected[layer.name][chunk.start : chunk.end]
        layer.blocks[ids, :, positions % self.block_size] = values

    def _attended_from(self, group_id: int, position: int) -> int:
        spec = self.config.kv_cache_groups[group_id].kv_cache_spec
        if isinstance(spec, SlidingWindowSpec):
            return max(0, position - spec.sliding_window + 1)
        return 0


def _layer(name: str, group_id: int, cache: torch.Tensor, rank: int) -> Layer:
    content: Any = cache.view(torch.uint8).numpy()
    words = content.view(np.uint64)
    return Layer(
        name, group_id, words, _salt(name, rank, words.shape[1], words.shape[3])
    )


@functools.cache
def _salt(name: str, rank: int, num_heads: int, num_words: int) -> Words:
    cells = itertools.product(range(num_heads), range(num_words))
    values = [zlib.crc32(f"{name}:{rank}:{h}:{w}".encode()) for h, w in cells]
    return mixed(np.array(values, np.uint64)).reshape(num_heads, num_words)
