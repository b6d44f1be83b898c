"""What an evict meets on its way to a store, and lives that have to be lengthened."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.connector.driving import TieredDriver, hint
from tests.connector.tier import gated_store
from tests.connector.tier.test_recall import PROMPT, edit, make, serve, stat

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(60)]


@pytest.fixture(autouse=True)
def _gates() -> Iterator[None]:
    gated_store.register()
    yield
    gated_store.reads.open()
    gated_store.writes.open()


def start(driver: TieredDriver, session_id: str, kind: str) -> Future[str]:
    """Sends an edit and does not wait for its end."""
    payload = {
        "op": "apply_edits",
        "tenant": "",
        "session_id": session_id,
        "edits": [{"type": kind}],
        "wait_s": 30,
    }
    answer = driver.side.control(json.dumps(payload), is_paused=False)
    assert isinstance(answer, Future)
    return answer


def step_until(driver: TieredDriver, condition: Callable[[], bool], what: str) -> None:
    for _ in range(10_000):
        if condition():
            return
        driver.step()
        time.sleep(0.0005)
    raise AssertionError(what)


def lives_of(name: str) -> list[float]:
    """Seconds that each value has left."""
    values = gated_store.data[name]._values.copy()
    return [value.expire_at - time.monotonic() for value in values.values()]


def test_an_evict_ends_a_recall_under_way() -> None:
    with make("gated://recall") as a, make("gated://recall") as b:
        b.ranks._marks = a.ranks._marks
        serve(a, "first", "s")
        assert edit(a, "s", "offload")["status"] == "completed"
        gated_store.reads.close()
        prefetch = start(b, "s", "prefetch")
        step_until(b, gated_store.reads.has_caller.is_set, "a read")
        assert edit(b, "s", "evict")["status"] == "completed"
        gated_store.reads.open()
        step_until(b, prefetch.done, "the end of the prefetch")
        assert (stat(b, "sessions"), stat(b, "store_leases")) == (0, 0)
        step_until(b, lambda: not stat(b, "store_jobs_in_flight"), "the end of reads")
        b.check_no_leak()


def test_a_range_that_begins_inside_a_value_is_not_safe_as_a_whole() -> None:
    with make("gated://range", blocks_per_value=4, ranges=True) as a:
        serve(a, "first", "s")
        result = edit(a, "s", "offload", block_start=2, block_end=10)
        assert result["status"] == "partial"
        assert "inside a value" in result["reason"]
        assert result["blocks"]["missing"] == 2
        assert len(lives_of("range")) == 2
        whole = edit(a, "s", "offload", block_start=4, block_end=8)
        assert whole["status"] == "completed"


def test_a_purge_wins_against_a_write_under_way() -> None:
    with make("gated://purge") as a:
        serve(a, "first", "s")
        gated_store.writes.close()
        offload = start(a, "s", "offload")
        step_until(a, gated_store.writes.has_caller.is_set, "a write")
        assert edit(a, "s", "evict", purge=True)["status"] == "completed"
        gated_store.writes.open()
        step_until(a, offload.done, "the end of the offload")
        step_until(a, lambda: not stat(a, "store_jobs_in_flight"), "the end of writes")
        step_until(a, lambda: not lives_of("purge"), "the values to be deleted")
        a.check_no_leak()


def test_an_offload_lengthens_the_life_of_what_another_session_has_written() -> None:
    def engine(ttl_s: float) -> TieredDriver:
        config: dict[str, Any] = {
            "store": "gated://lives",
            "store_value_bytes": 512,
            "store_lookup_timeout_s": 10,
            "store_timeout_s": 10,
            "store_ttl_s": ttl_s,
            "store_keep_alive_s": ttl_s / 4,
        }
        return TieredDriver(extra_config=config, num_blocks=64)

    with engine(30) as a, engine(3_000) as b:
        b.ranks._marks = a.ranks._marks
        serve(a, "first", "s")
        assert edit(a, "s", "offload")["status"] == "completed"
        # Its look-up finds them, and they come from the store.
        b.run("second", PROMPT, max_tokens=4, agent_hint=hint("t"))
        assert stat(b, "store_read_values") > 0
        assert edit(b, "t", "offload")["status"] == "completed"
        assert min(lives_of("lives")) > 1_000
