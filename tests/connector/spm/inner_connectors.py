"""Connectors to be wrapped, which do what a test tells them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

from sam_connector.transfer.contract import Direction
from tests.connector.toy_connector import ToyConnector, ToyMetadata

#: Methods that raise, in either role.
RAISING: set[str] = set()
#: Calls by method.
CALLS: Counter[str] = Counter()
#: By storage and tokens: rank and layer, and what was saved of it.
STORE: dict[str, dict[tuple[int, ...], dict[tuple[int, str], torch.Tensor]]] = {}
#: Requests whose end the next step reports.
SENT: set[str] = set()
#: Blocks that were loaded into.
LOADED: list[int] = []


def called(name: str) -> None:
    CALLS[name] += 1
    if name in RAISING:
        raise RuntimeError(f"{name} was told to fail")


class FaultyToy(ToyConnector):
    """``ToyConnector``, which loads asynchronously, and some of whose methods raise."""

    #: Goes on with the blocks of requests that are not the engine's.
    lingers = False
    #: The answer to every look-up instead of what is there.
    answer: tuple[int | None, bool] | None = None

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        called("get_num_new_matched_tokens")
        if self.answer is not None:
            return self.answer
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        called("build_connector_meta")
        return metadata

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        delays, params = super().request_finished_all_groups(request, block_ids)
        is_ours = request.request_id.startswith("sam-spm-")
        return delays or (self.lingers and is_ours), params

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ToyMetadata)
        # A save that it forgets would hold its blocks for good.
        if all(job.direction is Direction.LOAD for _, job in metadata.jobs):
            called("start_load_kv")
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.finished_sending |= SENT
        SENT.clear()
        return results


class _Part(NamedTuple):
    tokens: tuple[int, ...]
    block_ids: list[int]
    is_store: bool


@dataclass
class SequenceMetadata(KVConnectorMetadata):
    parts: list[_Part] = field(default_factory=list)


class SequenceToy(KVConnectorBase_V1):
    """Saves whole prompts in the step that computes them, and loads synchronously.

    A small likeness of vLLM's ``ExampleConnector``, in memory, with the same habits: it
    asserts that what it is to load is scheduled, and loads nothing without attention
    metadata, unless told to: the ranks of these tests have none.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.storage = STORE.setdefault(extra["storage"], {})
        self.does_nothing = bool(extra.get("does_nothing"))
        self.loads_without_metadata = bool(extra.get("loads_without_metadata"))
        self.block_size = vllm_config.cache_config.block_size
        self.rank = vllm_config.parallel_config.rank
        self.seen: list[str] = []
        self.ended: set[str] = set()
        self._to_load: dict[str, Any] = {}
        self._kv_caches: dict[str, torch.Tensor] = {}

    def _key(self, tokens: list[int], num_left: int) -> tuple[int, ...]:
        count = (len(tokens) - num_left) // self.block_size * self.block_size
        return tuple(tokens[: max(0, count)])

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        called("get_num_new_matched_tokens")
        key = self._key(request.prompt_token_ids, 2)
        if key not in self.storage:
            return 0, False
        return len(key) - num_computed_tokens, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens > 0:
            self._to_load[request.request_id] = request

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata, num_loads = SequenceMetadata(), 0
        self.ended |= scheduler_output.finished_req_ids
        for data in scheduler_output.scheduled_new_reqs:
            self.seen.append(data.req_id)
            is_load = data.req_id in self._to_load
            num_loads += is_load
            if is_load or self._key(data.prompt_token_ids, 2) not in self.storage:
                key = self._key(data.prompt_token_ids, 1)
                if is_load:
                    key = self._key(data.prompt_token_ids, 2)
                part = _Part(key, data.block_ids[0], not is_load)
                metadata.parts.append(part)
        assert num_loads == len(self._to_load)
        self._to_load.clear()
        return metadata

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._kv_caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        called("start_load_kv")
        has_metadata = isinstance(forward_context.attn_metadata, dict)
        if self.does_nothing or not (has_metadata or self.loads_without_metadata):
            return
        for part in self._parts(is_store=False):
            LOADED.extend(part.block_ids[: len(part.tokens) // self.block_size])
            for name, cache in self._kv_caches.items():
                saved = self.storage[part.tokens][self.rank, name]
                cache[part.block_ids[: len(saved)]] = saved

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        called("save_kv_layer")
        for part in self._parts(is_store=True):
            count = len(part.tokens) // self.block_size
            saved = kv_layer[part.block_ids[:count]].clone()
            layers = self.storage.setdefault(part.tokens, {})
            layers[self.rank, layer_name] = saved

    def wait_for_save(self) -> None:
        called("wait_for_save")

    def _parts(self, *, is_store: bool) -> list[_Part]:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, SequenceMetadata)
        return [part for part in metadata.parts if part.is_store is is_store]
