"""What the inner connector does wrong on a rank stays there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
)

from sam_connector.connector.spm.metadata import (
    REQUEST_PREFIX,
    JobKind,
    SpmJob,
    SpmMetadata,
)
from sam_connector.connector.spm.worker import SpmWorker
from sam_connector.core.clock import ManualClock

pytestmark = pytest.mark.vllm

WAIT_S = 30.0
OURS = f"{REQUEST_PREFIX}7"
SYNC_LOAD = SpmJob(7, JobKind.LOAD, OURS, (1, 2))
ASYNC_LOAD = SpmJob(7, JobKind.LOAD, OURS, (1, 2), True)
SAVE = SpmJob(8, JobKind.SAVE, f"{REQUEST_PREFIX}8")
STEP_SAVES = SpmJob(9, JobKind.STEP_SAVES)


class Inner:
    """Does what ``calls`` say, and reports what it is told to."""

    def __init__(self) -> None:
        self.raising: set[str] = set()
        self.calls: list[str] = []
        self.contexts: list[Any] = []
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.sent: set[str] = set()
        self.invalid: set[int] = set()
        self.written: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if name in self.raising:
                raise OSError("disk on fire")

        return call

    def start_load_kv(self, context: Any) -> None:
        self.contexts.append(context)
        self.calls.append("start_load_kv")
        for tensor in self.written:
            tensor.fill_(1)
        if "start_load_kv" in self.raising:
            raise OSError("disk on fire")

    def get_transfer_results(self, finished: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        results.finished_recving, self.received = self.received, set()
        results.failed_recving, self.failed = self.failed, set()
        results.finished_sending, self.sent = self.sent, set()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self.invalid = self.invalid, set()
        return invalid


class Rank:
    """A worker around ``Inner``, driven one step at a time."""

    def __init__(self) -> None:
        self.inner = Inner()
        self.clock = ManualClock()
        self.cache = {name: torch.zeros(4, 2, 4, 8) for name in ("a", "b")}
        self.worker = SpmWorker(
            self.inner,  # type: ignore[arg-type]
            rank=0,
            num_blocks=4,
            failed_load_wait_s=WAIT_S,
            clock=self.clock,
        )
        self.worker.register_kv_caches(self.cache)

    def step(
        self, *jobs: SpmJob, forward: bool = False, plan: bool = True, **fields: Any
    ) -> tuple[KVConnectorTransferResults, set[int], dict[int, str | None]]:
        inner = KVConnectorMetadata() if plan else None
        metadata = {"layer": None} if forward else None
        self.worker.begin(SpmMetadata(inner, jobs, **fields))
        self.worker.start_loads(
            SimpleNamespace(attn_metadata=metadata, no_compile_layers={})
        )
        if forward:
            for name, cache in self.cache.items():
                self.worker.wait_for_layer_load(name)
                self.worker.save_layer(name, cache, None)
        self.worker.wait_for_save()
        results = self.worker.take_transfer_results(set())
        invalid = self.worker.take_invalid_blocks()
        report = self.worker.take_report()
        ended = {} if report is None else {r.job_id: r.error for r in report.results}
        self.worker.end()
        return results, invalid, ended


@pytest.fixture
def rank() -> Rank:
    return Rank()


def write_blocks(rank: Rank, *block_ids: int) -> None:
    rank.inner.written = [c[i] for c in rank.cache.values() for i in block_ids]


# --- loads of ours --------------------------------------------------------------------


def test_a_load_of_every_block_has_ended_well(rank: Rank) -> None:
    write_blocks(rank, 1, 2)
    _, invalid, ended = rank.step(SYNC_LOAD)
    assert ended == {7: None}
    assert not invalid


def test_a_load_of_some_blocks_has_failed(rank: Rank) -> None:
    write_blocks(rank, 1)
    error = rank.step(SYNC_LOAD)[2][7]
    assert error is not None
    assert "not written" in error


def test_a_step_without_a_forward_pass_looks_like_one_to_a_load_of_ours(
    rank: Rank,
) -> None:
    write_blocks(rank, 1, 2)
    rank.step(SYNC_LOAD)
    rank.step()
    assert set(rank.inner.contexts[0].attn_metadata) == {"a", "b"}
    assert rank.inner.contexts[1].attn_metadata is None


def test_blocks_that_it_says_it_could_not_load_are_not_the_engines(
    rank: Rank,
) -> None:
    write_blocks(rank, 1, 2)
    rank.inner.invalid = {2, 3}
    _, invalid, ended = rank.step(SYNC_LOAD)
    assert invalid == {3}
    assert ended[7] is not None


def test_an_asynchronous_load_ends_when_it_says_so(rank: Rank) -> None:
    assert rank.step(ASYNC_LOAD)[2] == {}
    write_blocks(rank, 1, 2)
    rank.inner.received = {OURS, "r"}
    results, _, ended = rank.step()
    assert ended == {7: None}
    assert results.finished_recving == {"r"}


@pytest.mark.parametrize("how", ["failed", "invalid", "untouched"])
def test_an_asynchronous_load_that_failed(rank: Rank, how: str) -> None:
    rank.step(ASYNC_LOAD)
    if how != "untouched":
        write_blocks(rank, 1, 2)
    rank.inner.received = {OURS}
    rank.inner.failed = {OURS} if how == "failed" else set()
    rank.inner.invalid = {2} if how == "invalid" else set()
    results, invalid, ended = rank.step()
    assert ended[7] is not None
    assert not results.failed_recving
    assert not results.finished_recving
    assert not invalid


def test_what_it_goes_on_sending_of_ours_is_ours_to_hear(rank: Rank) -> None:
    rank.inner.sent = {OURS, "r"}
    results, _, ended = rank.step()
    assert results.finished_sending == {"r"}
    assert ended == {7: None}


# --- what raises ----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["start_load_kv", "wait_for_layer_load"])
def test_a_load_that_raises_voids_the_blocks_of_its_step(
    rank: Rank, method: str
) -> None:
    rank.inner.raising.add(method)
    _, invalid, ended = rank.step(
        SYNC_LOAD, STEP_SAVES, forward=True, sync_blocks=frozenset({3})
    )
    assert invalid == {3}
    assert "disk on fire" in str(ended[7])
    # What was computed from those blocks must not be saved either.
    assert "disk on fire" in str(ended[9])
    rank.inner.raising.clear()
    assert rank.step(STEP_SAVES, forward=True)[1:] == (set(), {9: None})


def test_nothing_is_saved_in_a_step_whose_load_has_failed(rank: Rank) -> None:
    rank.inner.raising.add("start_load_kv")
    rank.step(STEP_SAVES, SAVE, forward=True)
    assert "save_kv_layer" not in rank.inner.calls


def test_a_request_that_may_still_be_loaded_into_keeps_its_blocks(rank: Rank) -> None:
    rank.inner.raising.add("start_load_kv")
    results, _, ended = rank.step(ASYNC_LOAD, async_requests=frozenset({"r"}))
    assert not results.finished_recving
    assert ended == {}
    rank.inner.raising.clear()
    rank.clock.advance(WAIT_S - 1)
    assert not rank.step()[0].finished_recving
    rank.clock.advance(1)
    results, _, ended = rank.step()
    assert results.finished_recving == results.failed_recving == {"r"}
    assert "disk on fire" in str(ended[7])


def test_its_own_word_ends_the_wait_and_counts_as_a_failure(rank: Rank) -> None:
    rank.inner.raising.add("start_load_kv")
    rank.step(async_requests=frozenset({"r"}))
    rank.inner.received = {"r"}
    results = rank.step()[0]
    assert results.finished_recving == results.failed_recving == {"r"}


def test_every_load_is_reported_once(rank: Rank) -> None:
    rank.inner.raising.add("start_load_kv")
    rank.step(async_requests=frozenset({"r"}))
    rank.clock.advance(WAIT_S)
    assert rank.step()[0].finished_recving == {"r"}
    rank.inner.received = {"r"}
    results = rank.step()[0]
    assert not results.finished_recving
    assert not results.failed_recving


def test_what_it_had_no_plan_for_has_failed(rank: Rank) -> None:
    results, invalid, ended = rank.step(
        SYNC_LOAD,
        STEP_SAVES,
        plan=False,
        async_requests=frozenset({"r"}),
        sync_blocks=frozenset({3}),
    )
    assert invalid == {3}
    assert all(ended.values())
    assert "start_load_kv" not in rank.inner.calls
    # It may have kept it for later.
    assert not results.finished_recving
    rank.clock.advance(WAIT_S)
    results, _, _ = rank.step(plan=False)
    assert results.finished_recving == results.failed_recving == {"r"}


# --- saves of ours --------------------------------------------------------------------


@pytest.mark.parametrize("forward", [False, True])
def test_each_layer_is_shown_once(rank: Rank, forward: bool) -> None:
    assert rank.step(SAVE, forward=forward)[2] == {8: None}
    assert rank.inner.calls.count("save_kv_layer") == 2


def test_a_step_with_no_save_of_ours_shows_nothing(rank: Rank) -> None:
    rank.step(STEP_SAVES)
    assert "save_kv_layer" not in rank.inner.calls


@pytest.mark.parametrize("method", ["save_kv_layer", "wait_for_save"])
def test_a_save_that_raises_has_failed(rank: Rank, method: str) -> None:
    rank.inner.raising.add(method)
    ended = rank.step(SAVE, STEP_SAVES)[2]
    assert "disk on fire" in str(ended[8])
    assert "disk on fire" in str(ended[9])


def test_memory_that_is_not_known_is_not_loaded_into() -> None:
    rank = Rank()
    rank.worker.register_kv_caches({"a": torch.zeros(5, 2, 4, 8)})
    ended = rank.step(SYNC_LOAD)[2]
    assert "not known" in str(ended[7])
    assert "start_load_kv" not in rank.inner.calls
