"""Which of the engine's requests the inner connector hears of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from benchmarks.scheduler_harness import make_request
from sam_connector.connector.spm.config import SpmConfig
from sam_connector.connector.spm.requests import RequestWatch
from sam_connector.connector.spm.traits import ConnectorTraits, traits_of
from sam_connector.core.clock import ManualClock

pytestmark = pytest.mark.vllm

SIZE = 16
PROMPT = list(range(100))


class Chains:
    """Of a cache with one group."""

    primary_block_size = SIZE
    block_sizes: ClassVar[dict[int, int]] = {0: SIZE}

    def hashes(self, request: Any, group_id: int) -> Any:
        return request.block_hashes


def watch_with(traits: ConnectorTraits) -> tuple[RequestWatch, ManualClock]:
    clock = ManualClock()
    config = SpmConfig(traits=traits, failed_retry_s=60)
    return RequestWatch(config, Chains(), clock), clock  # type: ignore[arg-type]


@pytest.fixture
def example() -> RequestWatch:
    return watch_with(traits_of("ExampleConnector", {})[0])[0]


@pytest.fixture
def plain() -> RequestWatch:
    return watch_with(ConnectorTraits())[0]


def scheduled(request: Any, num_tokens: int, num_computed: int = 0) -> Any:
    data = SimpleNamespace(
        req_id=request.request_id,
        prompt_len=request.num_prompt_tokens,
        num_computed_tokens=num_computed,
    )
    return SimpleNamespace(
        scheduled_new_reqs=[data],
        num_scheduled_tokens={request.request_id: num_tokens},
    )


@pytest.mark.parametrize(
    ("num_computed", "matched", "is_async", "expected"),
    [
        (0, 32, False, (32, False)),
        (0, 32, True, (32, True)),
        (32, -32, False, (0, False)),
        (0, 0, True, (0, False)),
        (0, 40, False, (32, False)),
        (0, 8, True, (0, False)),
        (0, 1_000, False, (96, False)),
        (64, 36, False, (32, False)),
    ],
)
def test_answers_are_such_that_the_scheduler_survives_them(
    plain: RequestWatch,
    num_computed: int,
    matched: int,
    is_async: bool,
    expected: tuple[int, bool],
) -> None:
    request = make_request("r", PROMPT)
    found = plain.checked_match(request, num_computed, matched, is_async)
    assert found == expected


def test_a_synchronous_hit_leaves_a_token_to_compute(plain: RequestWatch) -> None:
    request = make_request("r", PROMPT[:96])
    assert plain.checked_match(request, 0, 96, False) == (80, False)
    assert plain.checked_match(request, 0, 96, True) == (96, True)


@pytest.mark.parametrize("field", ["cache_salt", "lora_request"])
def test_what_it_cannot_tell_apart_is_hidden(example: RequestWatch, field: str) -> None:
    request = make_request("r", PROMPT)
    setattr(request, field, "x")
    example.add(request)
    assert not example.may_load(request)
    assert example.plan_step(scheduled(request, 100)).hidden == {"r"}
    setattr(request, field, None)
    assert example.may_load(request)
    assert example.plan_step(scheduled(request, 100)).hidden == set()


def test_a_prompt_of_embeddings_is_hidden_from_everybody(plain: RequestWatch) -> None:
    request = make_request("r", PROMPT)
    request.prompt_token_ids = None
    assert not plain.may_load(request)


def test_a_chunk_is_hidden_from_one_that_needs_it_whole(
    example: RequestWatch, plain: RequestWatch
) -> None:
    request = make_request("r", PROMPT)
    for watch in (example, plain):
        watch.add(request)
    assert example.plan_step(scheduled(request, 64)).hidden == {"r"}
    plan = example.plan_step(scheduled(request, 36, 64))
    assert plan.hidden == set()
    assert plan.saves == [request.block_hashes[:6]]
    assert plain.plan_step(scheduled(request, 64)).hidden == set()


def test_only_one_that_saves_in_the_step_is_believed_to(plain: RequestWatch) -> None:
    request = make_request("r", PROMPT)
    plain.add(request)
    assert plain.plan_step(scheduled(request, 100)).saves == []


def test_a_load_is_part_of_one_step(plain: RequestWatch) -> None:
    request = make_request("r", PROMPT)
    plain.add(request)
    plain.checked_match(request, 16, 64, False)
    plain.add_load(request, [10, 11, 12, 13, 14, 15, 16], 64)
    plan = plain.plan_step(scheduled(request, 20, 80))
    assert plan.sync_blocks == {11, 12, 13, 14}
    assert plan.async_requests == set()
    assert not plain.plan_step(scheduled(request, 1, 100)).sync_blocks


@pytest.mark.parametrize("by", ["block", "request"])
def test_what_has_failed_is_not_asked_for_again_for_a_while(by: str) -> None:
    watch, clock = watch_with(ConnectorTraits())
    request, next_request = make_request("r", PROMPT), make_request("n", PROMPT)
    watch.add(request)
    watch.checked_match(request, 0, 96, True)
    watch.add_load(request, list(range(10, 16)), 96)
    assert watch.plan_step(scheduled(request, 0)).async_requests == {"r"}
    assert watch.on_failures({99}, {"other"}) == []
    lost = watch.on_failures(
        {12} if by == "block" else set(), set() if by == "block" else {"r"}
    )
    assert lost == [request.block_hashes[5]]
    assert not watch.may_load(request)
    assert watch.may_load(next_request)
    assert watch.checked_match(next_request, 0, 96, True) == (0, False)
    clock.advance(61)
    assert watch.checked_match(next_request, 0, 96, True) == (96, True)
    watch.remove(request)
    assert watch.num_live == 0
    assert watch.may_load(request)
