"""Sessions, and what is remembered of them."""

from __future__ import annotations

import pytest

from sam_connector.core.types import SessionKey
from tests.connector.driving import STREAMS, hint
from tests.connector.spm.driving import SpmDriver

pytestmark = pytest.mark.vllm

NUM_BLOCKS = 10
PROMPT = [*STREAMS[0][: NUM_BLOCKS * 16], 7]
S = SessionKey("", "s")


def test_requests_without_a_session_are_not_remembered() -> None:
    with SpmDriver("SequenceToy") as driver:
        driver.run("r", PROMPT)
        assert driver.spm.stats()["sessions_remembered"] == 0
        driver.check_no_leak()


def test_keys_are_tracked_as_they_are_saved() -> None:
    with SpmDriver("SequenceToy") as driver:
        driver.run("r", PROMPT, agent_hint=hint("s"))
        assert driver.spm.stats()["keys_tracked"] == 1
        assert driver.spm.query_residency(S, ()).num_blocks == NUM_BLOCKS
        driver.run("t", PROMPT, agent_hint=hint("t"))
        assert driver.spm.stats()["keys_shared"] == 1
        driver.edit("s", {"type": "evict"})
        assert driver.spm.stats()["keys_shared"] == 0
        driver.edit("t", {"type": "evict"})
        assert driver.spm.stats()["keys_orphaned"] == 1
        assert driver.spm.stats()["tokens_remembered"] == 0
        driver.check_no_leak()


def test_a_save_that_one_rank_has_not_confirmed_is_not_tracked() -> None:
    with SpmDriver("SequenceToy", tensor_parallel_size=2, report_lag={1: 50}) as driver:
        driver.run("r", PROMPT, agent_hint=hint("s"))
        assert driver.spm.stats()["keys_tracked"] == 0


def test_a_save_is_confirmed_by_a_look_up() -> None:
    with SpmDriver() as driver:
        driver.run("r", PROMPT, agent_hint=hint("s"))
        for number in range(200):
            if driver.spm.stats()["keys_tracked"]:
                break
            driver.run(f"step-{number}", STREAMS[1][:20])
        assert driver.spm.stats()["keys_tracked"] == NUM_BLOCKS
        driver.check_no_leak()


def test_freeing_a_session_forgets_it() -> None:
    with SpmDriver("SequenceToy") as driver:
        driver.run("r", PROMPT, agent_hint=hint("s"))
        driver.call("free_session", tenant="", session_id="s")
        assert driver.spm.stats()["sessions_remembered"] == 0
        assert driver.edit("s", {"type": "prefetch"})[0]["status"] == "not_found"
        driver.check_no_leak()


def test_a_session_of_another_tenant_is_another() -> None:
    with SpmDriver("SequenceToy") as driver:
        driver.run("r", PROMPT, agent_hint=hint("s"))
        driver.empty_cache()
        reply = driver.call(
            "apply_edits",
            tenant="other",
            session_id="s",
            edits=[{"type": "prefetch"}],
            wait_s=0,
        )
        assert reply["result"]["results"][0]["status"] == "not_found"
        assert driver.ask("s", "prefetch")["status"] == "completed"
        driver.check_no_leak()


def test_evict_of_what_only_we_remember() -> None:
    with SpmDriver("SequenceToy") as driver:
        driver.run("r", PROMPT, agent_hint=hint("s"))
        driver.empty_cache()
        (result,) = driver.edit("s", {"type": "evict"})
        assert result["status"] == "completed"
        assert driver.edit("s", {"type": "prefetch"})[0]["status"] == "not_found"
        driver.check_no_leak()


def test_an_offload_in_a_hint_is_of_the_request_itself() -> None:
    edits = {"edits": [{"type": "offload"}]}
    with SpmDriver("SequenceToy", max_num_batched_tokens=64) as driver:
        driver.run("r", PROMPT, agent_hint=hint("s", context_management=edits))
        assert max(map(len, driver.inner.storage)) == NUM_BLOCKS * 16
        driver.check_no_leak()


def test_tokens_are_bounded() -> None:
    with SpmDriver(
        "SequenceToy", extra_config={"max_remembered_tokens": 200}
    ) as driver:
        driver.run("r", PROMPT, agent_hint=hint("s"))
        driver.run("t", [*STREAMS[1][:160], 7], agent_hint=hint("t"))
        assert driver.spm.stats()["sessions_remembered"] == 1
        assert driver.spm.keys.tracker.num_chunks_of(S) == 0
        driver.empty_cache()
        assert driver.edit("s", {"type": "prefetch"})[0]["status"] == "not_found"
        assert driver.ask("t", "prefetch")["status"] == "completed"
        driver.check_no_leak()


def test_a_known_session_whose_tokens_are_forgotten_says_so() -> None:
    with SpmDriver(
        "SequenceToy", num_blocks=40, extra_config={"max_remembered_tokens": 16}
    ) as driver:
        driver.run("r", PROMPT, agent_hint=hint("s"))
        driver.run("other", STREAMS[1][: 38 * 16])
        result = driver.ask("s", "prefetch")
        assert result["status"] == "rejected"
        assert "not remembered" in result["reason"]
        driver.check_no_leak()
