"""``SPMConnector`` around vLLM's ``ExampleConnector``, which keeps blocks in files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.endpoints import session_of
from tests.live.host_tier import (
    CONTEXT_TOKENS,
    NUM_BLOCKS,
    edit,
    new_prompt,
    tokens_of,
)
from tests.live.server import BLOCK_SIZE, LiveServer, cached_tokens

#: Tokens of each answer: enough to fill a block after the prompt's last full one.
MAX_TOKENS = 24
#: What a request has computed when it ends, in whole blocks.
NUM_COMPUTED = NUM_BLOCKS + 1

COULD_NOT_LOAD = "the inner connector could not load"


class SpmServer(LiveServer):
    """A server whose connector wraps another."""

    def __init__(self, storage: Path) -> None:
        transfer = {
            "kv_connector": "SPMConnector",
            "kv_connector_module_path": "sam_connector.connector.spm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "inner": {
                    "kv_connector": "ExampleConnector",
                    "kv_connector_extra_config": {"shared_storage_path": str(storage)},
                }
            },
        }
        flags = [
            *("--kv-transfer-config", json.dumps(transfer)),
            *("--middleware", "sam_connector.AgentHintMiddleware"),
        ]
        super().__init__(connector=False, extra_args=flags)
        self.storage = storage

    @property
    def is_ours(self) -> bool:
        return True

    def saved(self) -> set[Path]:
        return set(self.storage.iterdir())


@pytest.fixture(scope="module")
def spm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpmServer]:
    with SpmServer(tmp_path_factory.mktemp("blocks")) as server:
        yield server


def empty_cache(server: LiveServer, session_id: str) -> None:
    """Loses the engine's cache, and checks that it has."""
    server.reset_prefix_cache()
    assert session_of(server, session_id) is None


def cold(server: SpmServer, prompt: list[int]) -> list[int]:
    """What the prompt is answered with nothing cached anywhere."""
    server.reset_prefix_cache()
    remove_files(server)
    answer = server.complete(prompt, max_tokens=MAX_TOKENS)
    assert cached_tokens(answer) == 0
    server.reset_prefix_cache()
    remove_files(server)
    return tokens_of(answer)


def remove_files(server: SpmServer) -> None:
    for folder in server.saved():
        shutil.rmtree(folder)


def test_a_session_comes_back_by_prefetch_with_its_id_alone(
    spm_server: SpmServer,
) -> None:
    server, prompt = spm_server, new_prompt()
    expected = cold(server, prompt)
    turn = [*prompt, *expected, *new_prompt(40)]
    expected_of_turn = cold(server, turn)
    answer = server.complete(prompt, max_tokens=MAX_TOKENS, hint={"session_id": "s"})
    assert tokens_of(answer) == expected
    (of_prompt,) = server.saved()

    offload = edit(server, "s", "offload")
    assert offload["status"] == "completed", offload
    assert offload["blocks"]["done"] == NUM_COMPUTED
    (of_context,) = server.saved() - {of_prompt}
    assert any(of_context.iterdir())

    empty_cache(server, "s")
    prefetch = edit(server, "s", "prefetch")
    assert prefetch["status"] == "completed", prefetch
    assert prefetch["blocks"]["done"] == NUM_COMPUTED
    session = session_of(server, "s")
    assert session is not None
    assert session["blocks"]["gpu"] == NUM_COMPUTED

    # From now on there are no files: what is cached was prefetched.
    remove_files(server)
    answer = server.complete(turn, max_tokens=MAX_TOKENS, hint={"session_id": "s"})
    assert cached_tokens(answer) == NUM_COMPUTED * BLOCK_SIZE
    assert tokens_of(answer) == expected_of_turn
    remove_files(server)
    answer = server.complete(prompt, max_tokens=MAX_TOKENS)
    assert cached_tokens(answer) == CONTEXT_TOKENS
    assert tokens_of(answer) == expected


def test_the_inner_connector_serves_requests_as_it_would_alone(
    spm_server: SpmServer,
) -> None:
    server, prompt = spm_server, new_prompt()
    expected = cold(server, prompt)
    assert tokens_of(server.complete(prompt, max_tokens=MAX_TOKENS)) == expected
    server.reset_prefix_cache()
    answer = server.complete(prompt, max_tokens=MAX_TOKENS)
    assert tokens_of(answer) == expected
    assert cached_tokens(answer) == CONTEXT_TOKENS


def test_a_deleted_file_costs_a_recompute(spm_server: SpmServer) -> None:
    server, prompt = spm_server, new_prompt()
    expected = cold(server, prompt)
    server.complete(prompt, max_tokens=MAX_TOKENS, hint={"session_id": "deleted"})
    assert edit(server, "deleted", "offload")["status"] == "completed"
    for folder in server.saved():
        for file in folder.iterdir():
            file.unlink()

    empty_cache(server, "deleted")
    num_failed = server.log_text().count(COULD_NOT_LOAD)
    prefetch = edit(server, "deleted", "prefetch")
    assert prefetch["status"] == "rejected", prefetch
    assert "FileNotFoundError" in prefetch["reason"]
    # What the prompt has saved is gone as well, and its folder is still there.
    for _ in range(2):
        answer = server.complete(prompt, max_tokens=MAX_TOKENS)
        assert tokens_of(answer) == expected
        server.reset_prefix_cache()
    # One of the prefetch and one of the first request: the second was not offered it.
    assert server.log_text().count(COULD_NOT_LOAD) == num_failed + 2


def test_evict_ends_what_is_remembered(spm_server: SpmServer) -> None:
    server, prompt = spm_server, new_prompt()
    server.complete(prompt, hint={"session_id": "evicted"})
    assert edit(server, "evicted", "evict")["status"] == "completed"
    assert session_of(server, "evicted") is None
    assert edit(server, "evicted", "prefetch")["status"] == "not_found"


def test_an_offload_in_the_hint_of_a_request(spm_server: SpmServer) -> None:
    server, prompt = spm_server, new_prompt()
    hint = {
        "session_id": "hinted",
        "context_management": {"edits": [{"type": "offload"}]},
    }
    before = server.saved()
    answer = server.complete(prompt, max_tokens=MAX_TOKENS, hint=hint)
    (result,) = answer["kv_transfer_params"]["agent_hint"]["results"]
    assert result["status"] == "accepted"
    assert edit(server, "hinted", "offload")["status"] == "completed"
    assert len(server.saved() - before) == 2
