"""What comes in the middle of an offload, of a prefetch, or of a request's load.

Copies are held until the test lets them go on, so the middle is where it says.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import httpx
import pytest

from benchmarks.demo.model import ensure_model
from tests.live.endpoints import COMPLETIONS, body_of, session_of, session_path
from tests.live.host_tier import (
    BLOCK_BYTES,
    CONTEXT_TOKENS,
    NUM_BLOCKS,
    begin,
    blocks_of,
    counted,
    displace,
    edit,
    gate_of,
    new_prompt,
    outcome,
    tokens_of,
    wait_for,
)
from tests.live.server import (
    BLOCK_SIZE,
    TEST_MODEL,
    LiveServer,
    cached_tokens,
    leak_check,
    wait_until_idle,
)

#: Blocks of a context that are copied in the first step.
FIRST_STEP = 4
LEASE = {"cache_control": {"ttl": 600}}
RESET = "/reset_prefix_cache"
NUM_PARALLEL = 10
#: The default: how long a request waits for what is loaded for another.
MAX_LOAD_WAIT_S = 1.0

both_kinds = pytest.mark.parametrize("kind", ["offload", "prefetch"])


def _session(server: LiveServer, kind: str = "prefetch") -> list[int]:
    """A session ``s`` that an edit of this kind has work for; returns its prompt."""
    prompt = new_prompt()
    server.complete(prompt, hint={"session_id": "s"})
    if kind == "prefetch":
        assert edit(server, "s", "offload")["status"] == "completed"
        displace(server)
    return prompt


def _expect(
    server: LiveServer, stock: LiveServer, prompt: Sequence[int], cached: int | None
) -> None:
    """The request is served as by a stock server, with so much from a cache."""
    answer = server.complete(prompt)
    assert tokens_of(answer) == tokens_of(stock.complete(prompt))
    if cached is not None:
        assert cached_tokens(answer) == cached


# --- edits ----------------------------------------------------------------------------


@both_kinds
def test_evict_cancels(
    tier_server: LiveServer, stock_server: LiveServer, kind: str
) -> None:
    server, prompt = tier_server, _session(tier_server, kind)
    with gate_of(server) as gate:
        gate.hold()
        operation = begin(server, "s", kind)
        gate.wait_for_held()
        assert edit(server, "s", "evict")["status"] == "completed"
        result = outcome(server, operation)
        assert result["status"] == "rejected"
        assert result["reason"] == "cancelled by evict"
        assert session_of(server, "s") is None
        # Blocks that are still read or written are nobody else's yet.
        assert server.stats()["gpu_pinned_blocks"] == FIRST_STEP
    assert server.stats()["gpu_pinned_blocks"] == 0
    _expect(server, stock_server, prompt, None)


@both_kinds
def test_session_is_deleted_meanwhile(
    tier_server: LiveServer, stock_server: LiveServer, kind: str
) -> None:
    server, prompt = tier_server, _session(tier_server, kind)
    with gate_of(server) as gate:
        gate.hold()
        operation = begin(server, "s", kind)
        gate.wait_for_held()
        server.delete(session_path("s"))
        assert session_of(server, "s") is None
        gate.open()
        outcome(server, operation)
    leak_check(server)
    _expect(server, stock_server, prompt, CONTEXT_TOKENS)


@both_kinds
def test_second_edit_of_the_same_kind_copies_nothing_again(
    tier_server: LiveServer, kind: str
) -> None:
    server = tier_server
    _session(server, kind)
    copied = "saved_bytes" if kind == "offload" else "loaded_bytes"
    with counted(server, copied) as risen, gate_of(server) as gate:
        gate.hold()
        operations = [begin(server, "s", kind) for _ in range(2)]
        gate.wait_for_held()
        gate.open()
        results = [outcome(server, operation) for operation in operations]
    assert [result["status"] for result in results] == ["completed"] * 2
    # Done once, and both are told what was done.
    assert [result["blocks"]["done"] for result in results] == [NUM_BLOCKS] * 2
    assert risen == {copied: NUM_BLOCKS * BLOCK_BYTES}


def test_session_turns_while_it_is_offloaded(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    """The newer turn decides: what it uses is not given up."""
    server, prompt = tier_server, _session(tier_server, "offload")
    longer = [*prompt, *new_prompt(2 * BLOCK_SIZE)]
    with gate_of(server) as gate:
        gate.hold()
        operation = begin(server, "s", "offload")
        gate.wait_for_held()
        answer = server.complete(longer, hint={"session_id": "s", **LEASE})
        assert cached_tokens(answer) == CONTEXT_TOKENS
        assert tokens_of(answer) == tokens_of(stock_server.complete(longer))
        gate.open()
        outcome(server, operation)
    _expect(server, stock_server, longer, CONTEXT_TOKENS + 2 * BLOCK_SIZE)


# --- requests -------------------------------------------------------------------------


def test_request_waits_for_a_prefetch_of_its_blocks(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    server, prompt = tier_server, _session(tier_server)
    with counted(server, "loaded_bytes") as risen, gate_of(server) as gate:
        gate.hold()
        begun = time.monotonic()
        operation = begin(server, "s", "prefetch")
        gate.wait_for_held()
        with ThreadPoolExecutor(1) as pool:
            request = pool.submit(server.complete, prompt)
            wait_for(lambda: _num_waiting(server) == 1, "the request")
            gate.open()
            may_load = time.monotonic() - begun > MAX_LOAD_WAIT_S
            answer = request.result()
        outcome(server, operation)
    assert tokens_of(answer) == tokens_of(stock_server.complete(prompt))
    assert cached_tokens(answer) == CONTEXT_TOKENS
    # On a machine so slow that the request ran out of patience it may have loaded
    # them itself.
    num_loaded = risen["loaded_bytes"] // BLOCK_BYTES
    assert num_loaded == NUM_BLOCKS or (may_load and num_loaded <= 2 * NUM_BLOCKS)


def test_request_does_not_wait_for_ever(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    """It loads what it needs itself; what the prefetch brings then is dropped."""
    server, prompt = tier_server, _session(tier_server)
    with counted(server, "loaded_bytes") as risen, gate_of(server) as gate:
        gate.hold()
        operation = begin(server, "s", "prefetch")
        gate.wait_for_held()
        gate.pass_new()
        _expect(server, stock_server, prompt, CONTEXT_TOKENS)
        gate.open()
        result = outcome(server, operation)
    assert result["status"] == "completed"
    assert risen == {"loaded_bytes": (NUM_BLOCKS + FIRST_STEP) * BLOCK_BYTES}
    _expect(server, stock_server, prompt, CONTEXT_TOKENS)


def test_prefetch_of_what_a_request_is_loading(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    server, prompt = tier_server, _session(tier_server)
    with counted(server, "loaded_bytes") as risen, gate_of(server) as gate:
        gate.hold()
        with ThreadPoolExecutor(1) as pool:
            request = pool.submit(server.complete, prompt)
            gate.wait_for_held()
            operation = begin(server, "s", "prefetch")
            gate.open()
            answer = request.result()
        result = outcome(server, operation)
    assert result["status"] == "completed"
    assert tokens_of(answer) == tokens_of(stock_server.complete(prompt))
    assert cached_tokens(answer) == CONTEXT_TOKENS
    assert risen == {"loaded_bytes": NUM_BLOCKS * BLOCK_BYTES}


def test_client_leaves_while_its_blocks_are_loaded(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    server, prompt = tier_server, _session(tier_server)
    body = body_of(COMPLETIONS) | {"prompt": prompt, "stream": True}
    body["agent_hint"] = {"session_id": "gone", **LEASE}
    with gate_of(server) as gate:
        gate.hold()
        with server.client.stream("POST", COMPLETIONS, json=body):
            gate.wait_for_held()
        wait_for(lambda: not server.stats()["running_requests"], "the abort")
        assert server.stats()["jobs_in_flight"] == 1
    leak_check(server)
    _expect(server, stock_server, prompt, CONTEXT_TOKENS)


@both_kinds
def test_client_of_an_edit_leaves(tier_server: LiveServer, kind: str) -> None:
    """The operation goes on; nobody waits for its answer any more."""
    server = tier_server
    _session(server, kind)
    path = f"{session_path('s')}/edits"
    body = {"edits": [{"type": kind}], "wait_s": 30}
    with gate_of(server) as gate:
        gate.hold()
        with pytest.raises(httpx.ReadTimeout):
            server.client.post(path, json=body, timeout=1)
        gate.wait_for_held()
        session = session_of(server, "s")
        assert session is not None
        (operation,) = session["operations"]
        assert operation["status"] == "accepted"
        gate.open()
        result = outcome(server, operation["operation_id"])
    assert result["status"] == "completed"
    assert blocks_of(server, "s")["host"] == NUM_BLOCKS


def test_preemptions_among_edits(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    """More requests than the pool can finish, with edits of their sessions."""
    server = tier_server
    prompts = [new_prompt(5 * BLOCK_SIZE + 5) for _ in range(NUM_PARALLEL)]
    names = [f"s-{number}" for number in range(NUM_PARALLEL)]

    def ask(number: int) -> list[int]:
        hint = {"session_id": names[number], **LEASE}
        return tokens_of(server.complete(prompts[number], max_tokens=80, hint=hint))

    before = server.metrics()["vllm:num_preemptions_total"]
    answers = []
    with ThreadPoolExecutor(NUM_PARALLEL) as pool:
        for _ in range(2):
            requests = [pool.submit(ask, number) for number in range(NUM_PARALLEL)]
            edits = itertools.cycle(itertools.product(names, ("offload", "prefetch")))
            while not all(request.done() for request in requests):
                edit(server, *next(edits), wait_s=0)
            answers.append([request.result() for request in requests])
        expected = list(
            pool.map(
                lambda prompt: tokens_of(stock_server.complete(prompt, max_tokens=80)),
                prompts,
            )
        )
    assert server.metrics()["vllm:num_preemptions_total"] > before
    assert answers == [expected] * 2
    assert server.stats()["internal_errors"] == 0


# --- the engine -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "cached"),
    [("", CONTEXT_TOKENS), ("?reset_external=true", 0)],
    ids=["gpu", "external"],
)
@both_kinds
def test_reset(
    tier_server: LiveServer,
    stock_server: LiveServer,
    kind: str,
    query: str,
    cached: int,
) -> None:
    server, prompt = tier_server, _session(tier_server, kind)
    with gate_of(server) as gate:
        gate.hold()
        operation = begin(server, "s", kind)
        gate.wait_for_held()
        # Blocks that a copy holds: vLLM says so, and clients try again.
        assert server.post(RESET + query).json() == {"success": False}
        gate.open()
        outcome(server, operation)
    wait_until_idle(server)
    assert server.post(RESET + query).json() == {"success": True}
    assert session_of(server, "s") is None
    _expect(server, stock_server, prompt, cached)


def test_reset_while_a_request_loads(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    """Also with running requests to be dropped, which vLLM may refuse."""
    server, prompt = tier_server, _session(tier_server)
    query = "?reset_running_requests=true&reset_external=true"
    with gate_of(server) as gate:
        gate.hold()
        with ThreadPoolExecutor(1) as pool:
            request = pool.submit(server.complete, prompt)
            gate.wait_for_held()
            # On its own connection, which vLLM closes if it cannot.
            answer = httpx.post(server.url + RESET + query, timeout=60)
            assert answer.status_code in {200, 500}
            gate.open()
            loaded = request.result()
    assert tokens_of(loaded) == tokens_of(stock_server.complete(prompt))
    wait_until_idle(server)
    assert server.post(RESET + query).json() == {"success": True}
    _expect(server, stock_server, prompt, 0)


@pytest.mark.parametrize(
    ("query", "cached"),
    [("", 0), ("?mode=wait", 0), ("?mode=keep&clear_cache=false", CONTEXT_TOKENS)],
    ids=["abort", "wait", "keep"],
)
@both_kinds
def test_pause(
    tier_server: LiveServer,
    stock_server: LiveServer,
    kind: str,
    query: str,
    cached: int,
) -> None:
    """A pause waits for copies, and none begin before the end of it."""
    server, prompt = tier_server, _session(tier_server, kind)
    with gate_of(server) as gate, ThreadPoolExecutor(1) as pool:
        gate.hold()
        operation = begin(server, "s", kind)
        gate.wait_for_held()
        pause = pool.submit(server.post, f"/pause{query}")
        gate.open()
        assert pause.result().status_code == 200
        try:
            for name in ("offload", "prefetch"):
                result = edit(server, "s", name)
                assert result["status"] == "rejected"
                assert result["reason"] == "the engine is paused"
            assert server.stats()["jobs_in_flight"] == 0
        finally:
            assert server.post("/resume").status_code == 200
        outcome(server, operation)
    _expect(server, stock_server, prompt, cached)


@both_kinds
def test_pause_waits_for_copies(tier_server: LiveServer, kind: str) -> None:
    server = tier_server
    _session(server, kind)
    with gate_of(server) as gate, ThreadPoolExecutor(1) as pool:
        gate.hold()
        begin(server, "s", kind)
        gate.wait_for_held()
        pause = pool.submit(server.post, "/pause")
        assert not wait([pause], timeout=1).done
        gate.open()
        assert pause.result().status_code == 200
        assert server.post("/resume").status_code == 200


@both_kinds
def test_other_weights(
    tier_server: LiveServer, stock_server: LiveServer, kind: str
) -> None:
    server, prompt = tier_server, _session(tier_server, kind)
    other = ensure_model(replace(TEST_MODEL, seed=TEST_MODEL.seed + 1))
    expected = tokens_of(stock_server.complete(prompt))
    with gate_of(server) as gate:
        gate.hold()
        operation = begin(server, "s", kind)
        gate.wait_for_held()
        _load_weights(server, str(other))
        gate.open()
        outcome(server, operation)
    try:
        wait_until_idle(server)
        server.post(f"{RESET}?reset_external=true")
        answers = [server.complete(prompt, cache_salt=salt) for salt in ("a", "b")]
        assert [cached_tokens(answer) for answer in answers] == [0, 0]
        assert tokens_of(answers[0]) == tokens_of(answers[1])
        assert tokens_of(answers[0]) != expected
    finally:
        _load_weights(server, str(ensure_model(TEST_MODEL)))
        server.post(f"{RESET}?reset_external=true")
    _expect(server, stock_server, prompt, 0)


def _load_weights(server: LiveServer, folder: str) -> None:
    """As a trainer does; neither the engine's cache nor ours hears of it."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    answer = server.post("/collective_rpc", body)
    assert answer.status_code == 200, answer.text


@both_kinds
def test_sleep(tier_server: LiveServer, stock_server: LiveServer, kind: str) -> None:
    """On a CPU it frees no memory, but is a pause like any other."""
    server, prompt = tier_server, _session(tier_server, kind)
    with gate_of(server) as gate, ThreadPoolExecutor(1) as pool:
        gate.hold()
        operation = begin(server, "s", kind)
        gate.wait_for_held()
        sleep = pool.submit(server.post, "/sleep?level=1")
        gate.open()
        assert sleep.result().status_code == 200
        try:
            assert edit(server, "s", kind)["status"] == "rejected"
            assert server.stats()["jobs_in_flight"] == 0
        finally:
            assert server.post("/wake_up").status_code == 200
        outcome(server, operation)
    _expect(server, stock_server, prompt, 0)


# --- copies that fail -----------------------------------------------------------------


def test_copy_of_an_offload_fails(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    server, prompt = tier_server, _session(tier_server, "offload")
    with counted(server, "failed_copies") as risen, gate_of(server) as gate:
        gate.fail_next()
        result = edit(server, "s", "offload")
    assert risen == {"failed_copies": 1}
    assert result["status"] == "partial"
    assert "failed on purpose" in result["reason"]
    assert result["blocks"]["missing"] == FIRST_STEP
    assert result["blocks"]["reclaimed"] == 0
    assert blocks_of(server, "s")["gpu"] == NUM_BLOCKS
    # It can be asked for again.
    result = edit(server, "s", "offload")
    assert result["status"] == "completed"
    assert result["blocks"]["done"] == FIRST_STEP
    displace(server)
    _expect(server, stock_server, prompt, CONTEXT_TOKENS)


def test_copy_of_a_prefetch_fails(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    """What could not be read once is not offered again."""
    server, prompt = tier_server, _session(tier_server)
    with counted(server, "failed_copies") as risen, gate_of(server) as gate:
        gate.fail_next()
        result = edit(server, "s", "prefetch")
    assert risen == {"failed_copies": 1}
    assert result["status"] == "partial"
    assert "failed on purpose" in result["reason"]
    assert result["blocks"]["missing"] == FIRST_STEP
    _expect(server, stock_server, prompt, 0)
    _expect(server, stock_server, prompt, CONTEXT_TOKENS)


def test_load_of_a_request_fails(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    server, prompt = tier_server, _session(tier_server)
    with counted(server, "failed_copies") as risen, gate_of(server) as gate:
        gate.fail_next()
        _expect(server, stock_server, prompt, 0)
    assert risen == {"failed_copies": 1}
    _expect(server, stock_server, prompt, CONTEXT_TOKENS)


def _num_waiting(server: LiveServer) -> float:
    return server.metrics()["vllm:num_requests_waiting"]
