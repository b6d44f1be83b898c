"""Requests that only the inner connector knows."""

from __future__ import annotations

import pytest

from benchmarks.scheduler_harness import make_request, make_scheduler
from sam_connector.connector.spm.sequences import TokenSequence
from sam_connector.connector.spm.synthetic import inner_view, scheduled
from sam_connector.connector.spm.synthetic import make_request as ours

pytestmark = pytest.mark.vllm

SIZE = 16


def sequence(num_blocks: int) -> TokenSequence:
    request = make_request("r", range(num_blocks * SIZE), block_size=SIZE)
    made = TokenSequence(SIZE, lora_request="adapter", cache_salt="salt")
    made.extend(request.block_hashes, request.prompt_token_ids)  # type: ignore[arg-type]
    return made


def test_a_request_of_ours_is_of_the_content_that_is_meant() -> None:
    whole = sequence(4)
    request = ours(5, whole, 3)
    assert request.request_id == "sam-spm-5"
    assert request.prompt_token_ids is not None
    assert request.prompt_token_ids[: 3 * SIZE] == list(whole.tokens[: 3 * SIZE])
    # No more than three blocks of it can be found, and all of those can.
    assert (request.num_tokens - 2) // SIZE == (request.num_tokens - 1) // SIZE == 3
    assert request.block_hashes == whole.hashes[:3]
    assert request.lora_request == "adapter"
    assert request.cache_salt == "salt"


def test_the_engine_s_step_is_not_changed() -> None:
    scheduler = make_scheduler(block_size=SIZE)
    for name, first in (("a", 0), ("b", 100)):
        tokens = range(first, first + 40)
        scheduler.add_request(make_request(name, tokens, block_size=SIZE))
    step = scheduler.schedule()
    request = ours(5, sequence(2), 2)
    request.num_computed_tokens = 2 * SIZE
    blocks = scheduler.kv_cache_manager.block_pool.get_new_blocks(2)
    view = inner_view(
        step, added=[scheduled(request, blocks)], hidden={"a"}, ended={"sam-spm-4"}
    )
    assert [data.req_id for data in view.scheduled_new_reqs] == ["b", "sam-spm-5"]
    assert view.scheduled_new_reqs[1].block_ids == ([b.block_id for b in blocks],)
    assert view.num_scheduled_tokens == {"b": 40, "sam-spm-5": 2}
    assert "sam-spm-4" in view.finished_req_ids
    assert [data.req_id for data in step.scheduled_new_reqs] == ["a", "b"]
    assert step.num_scheduled_tokens == {"a": 40, "b": 40}
    assert not step.finished_req_ids


def test_a_step_with_nothing_of_ours_is_passed_on_as_it_is() -> None:
    step = make_scheduler(block_size=SIZE).schedule()
    assert inner_view(step, added=[], hidden=set(), ended=set()) is step
