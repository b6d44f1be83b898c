"""Starts with a host tier: refused with one line, or served without it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks.common import CACHE_DIR, ServerError
from benchmarks.demo.model import ensure_model
from tests.live.host_tier import (
    BLOCK_BYTES,
    HOST_BYTES,
    POOL,
    edit,
    new_prompt,
    tokens_of,
)
from tests.live.processes import processes_of
from tests.live.server import TEST_MODEL, LiveServer, cached_tokens

NO_TIER = "this model is served without the host tier"
WINDOW = 64


@pytest.mark.parametrize(
    ("config", "policy", "line"),
    [
        (
            {"host_bytes": HOST_BYTES},
            None,
            "host_bytes needs kv_load_failure_policy to be recompute in "
            "--kv-transfer-config; it is 'fail'",
        ),
        (
            {"host_bytes": BLOCK_BYTES - 1},
            "recompute",
            f"host_bytes is too little for one block: {BLOCK_BYTES - 1} bytes",
        ),
        (
            {"host_bytes": "100TiB"},
            "recompute",
            "bytes are available",
        ),
    ],
    ids=["policy", "too_little", "too_much"],
)
def test_start_is_refused(
    config: Mapping[str, object], policy: str | None, line: str
) -> None:
    transfer: dict[str, object] = {
        "kv_connector": "SAMConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(config),
    }
    if policy is not None:
        transfer["kv_load_failure_policy"] = policy
    # The last of two equal flags counts.
    server = LiveServer(
        extra_args=["--kv-transfer-config", json.dumps(transfer)], num_blocks=POOL
    )
    try:
        with pytest.raises(ServerError, match="exited"):
            server.start()
        assert line in server.log_text()
        assert processes_of(server.pid) == []
    finally:
        server.stop()


@pytest.fixture(scope="module")
def window_server() -> Iterator[LiveServer]:
    """A model that attends to a window of tokens only."""
    with LiveServer(
        config={"host_bytes": HOST_BYTES, "save_policy": "all"},
        num_blocks=POOL,
        # A window needs a block more than it has tokens for.
        extra_args=["--max-model-len", "1024"],
        model=_with_window(ensure_model(TEST_MODEL)),
    ) as server:
        yield server


def test_sliding_window_is_served_without_the_tier(window_server: LiveServer) -> None:
    server, prompt = window_server, new_prompt()
    assert server.log_text().count(NO_TIER) == 1
    assert server.log_text().count("session hints are on for a KV cache of") == 1
    first = server.complete(prompt, hint={"session_id": "s"})
    warm = server.complete(prompt, hint={"session_id": "s"})
    assert cached_tokens(warm) > 0
    for kind in ("offload", "prefetch"):
        result = edit(server, "s", kind)
        assert result["status"] == "unsupported"
        assert result["reason"] == f"no connector in this engine can {kind}"
    # A tier would keep what it has.
    server.reset_prefix_cache()
    cold = server.complete(prompt, hint={"session_id": "s"})
    assert cached_tokens(cold) == 0
    assert tokens_of(first) == tokens_of(warm) == tokens_of(cold)
    assert edit(server, "s", "evict")["status"] == "completed"
    assert "host_slots" not in server.stats()
    assert server.log_text().count(NO_TIER) == 1


def _with_window(model: Path) -> Path:
    """The same weights under a Mistral's configuration."""
    folder = CACHE_DIR / "models" / f"{model.name}-window"
    shutil.copytree(model, folder, dirs_exist_ok=True)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": WINDOW,
    }
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder
