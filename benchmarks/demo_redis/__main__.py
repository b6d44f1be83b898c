"""``python -m benchmarks.demo_redis``: a session moves from one server to another.

Two vLLM servers share a store (a private Valkey). Each of ten sessions is served on A
and offloaded; then B, whose own caches are emptied and found empty first, is told to
prefetch it by its id, and goes on with it. The same prompt is served by B cold as
well, before or after in turn. In the end A is killed, started anew, and finds the
first session again.

The last line is JSON. TTFT is what the client sees, with one request at a time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import RESULTS_DIR, VllmServer, machine, sam_flags
from benchmarks.demo.model import DEMO_MODEL, ensure_model
from benchmarks.demo_redis.client import MODEL_NAME, Answer, SessionClient

_BLOCK_SIZE = 32
_HOST_BYTES = 128 << 20
_NUM_BLOCKS = 400
_CONTEXT_TOKENS = 3_000
_NEW_TOKENS = 48
_OUTPUT_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One session, served on A and resumed on B."""

    ttft_cold_s: float
    ttft_prefetched_s: float
    prefetch_s: float
    prompt_tokens: int
    cached_tokens: int
    is_identical: bool
    read_bytes: int


def make_server(model: Path, name: str, store_url: str) -> VllmServer:
    config = {
        "host_bytes": _HOST_BYTES,
        "store": store_url,
        # A shared machine may stall for longer than the default allows.
        "store_timeout_s": 2.0,
    }
    return VllmServer(
        model,
        [
            *("--served-model-name", MODEL_NAME),
            *("--dtype", "float32"),
            *("--block-size", str(_BLOCK_SIZE)),
            *("--num-gpu-blocks-override", str(_NUM_BLOCKS)),
            *("--max-model-len", "4096"),
            *("--max-num-batched-tokens", "4096"),
            *("--uvicorn-log-level", "warning"),
            "--enforce-eager",
            "--enable-prompt-tokens-details",
            *sam_flags(config),
        ],
        log_path=RESULTS_DIR / f"demo-redis-{name}.log",
    )


def run_pair(a: SessionClient, b: SessionClient, index: int, seed: int) -> Pair:
    """Serves a session on A, offloads it, and goes on with it on B."""
    rng = random.Random(seed)
    prompt = [rng.randrange(10, DEMO_MODEL.vocab_size) for _ in range(_CONTEXT_TOKENS)]
    session_id = f"agent-{seed}"
    first = a.complete(prompt, _OUTPUT_TOKENS, session_id=session_id)
    a.edit(session_id, "offload")
    new_tokens = [rng.randrange(10, DEMO_MODEL.vocab_size) for _ in range(_NEW_TOKENS)]
    resumed = [*prompt, *first.token_ids, *new_tokens]

    def cold() -> Answer:
        b.empty()
        # Other block hashes: nobody has these, wherever it looks.
        return b.complete(resumed, _OUTPUT_TOKENS, cache_salt=f"cold-{seed}")

    reference = cold() if index % 2 == 0 else None
    b.empty()
    b.check_empty()
    read_before = b.stat("store_read_bytes")
    begin = time.monotonic()
    b.edit(session_id, "prefetch")
    prefetch_s = time.monotonic() - begin
    answer = b.complete(resumed, _OUTPUT_TOKENS, session_id=session_id)
    read_bytes = b.stat("store_read_bytes") - read_before
    reference = reference or cold()
    if reference.cached_tokens:
        raise RuntimeError(f"a cold request found {reference.cached_tokens} tokens")
    if not read_bytes:
        raise RuntimeError("B has read nothing from the store")
    return Pair(
        ttft_cold_s=reference.ttft_s,
        ttft_prefetched_s=answer.ttft_s,
        prefetch_s=prefetch_s,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        is_identical=answer.token_ids == reference.token_ids,
        read_bytes=read_bytes,
    )


def is_found(server: SessionClient, seed: int) -> bool:
    """Whether a server that was just started brings a session back by its id."""
    rng = random.Random(seed)
    prompt = [rng.randrange(10, DEMO_MODEL.vocab_size) for _ in range(_CONTEXT_TOKENS)]
    server.check_empty()
    try:
        server.edit(f"agent-{seed}", "prefetch")
    except RuntimeError as error:
        _say(str(error))
        return False
    answer = server.complete(prompt, 1, session_id=f"agent-{seed}")
    return answer.cached_tokens >= 0.95 * answer.prompt_tokens


def summary(pairs: list[Pair], *, found_after_restart: bool) -> dict[str, object]:
    cold = statistics.median(pair.ttft_cold_s for pair in pairs)
    prefetched = statistics.median(pair.ttft_prefetched_s for pair in pairs)
    return {
        "resume_ttft_cold_s": round(cold, 4),
        "resume_ttft_prefetched_s": round(prefetched, 4),
        "ratio": round(prefetched / cold, 4),
        "cached_tokens": sum(pair.cached_tokens for pair in pairs),
        "prompt_tokens": sum(pair.prompt_tokens for pair in pairs),
        "least_cached_share": round(
            min(pair.cached_tokens / pair.prompt_tokens for pair in pairs), 4
        ),
        "tokens_identical": all(pair.is_identical for pair in pairs),
        "found_after_restart": found_after_restart,
        "prefetch_s": round(statistics.median(pair.prefetch_s for pair in pairs), 4),
        "store_bytes_read": sum(pair.read_bytes for pair in pairs),
        "pairs": len(pairs),
        "machine": machine(),
    }


def main(argv: list[str] | None = None) -> int:
    from sam_backends.embedded import EmbeddedServer

    parser = argparse.ArgumentParser(prog="benchmarks.demo_redis", description=__doc__)
    parser.add_argument("--pairs", type=int, default=10, help="sessions that move")
    parser.add_argument("--store", help="URL of a store to use instead of our own")
    options = parser.parse_args(argv)
    if options.pairs < 1:
        parser.error("--pairs must be at least 1")
    model = ensure_model()
    if options.store:
        return _run(model, options.store, options.pairs)
    with EmbeddedServer() as valkey:
        return _run(model, valkey.url, options.pairs)


def _run(model: Path, store_url: str, num_pairs: int) -> int:
    # Sessions of an earlier run may still be in a store that is not ours.
    seed = random.SystemRandom().randrange(1 << 32)
    a, b = make_server(model, "a", store_url), make_server(model, "b", store_url)
    _say(f"starting two servers on {store_url}")
    try:
        for server in (a, b):
            server.launch()
        for server in (a, b):
            server.wait_healthy()
        with SessionClient(a.url) as on_a, SessionClient(b.url) as on_b:
            for client in (on_a, on_b):
                client.complete(list(range(10, 400)), 2)
            pairs = []
            for index in range(num_pairs):
                pair = run_pair(on_a, on_b, index, seed + index)
                pairs.append(pair)
                _say(
                    f"session {index + 1}: cold {pair.ttft_cold_s:.3f} s, prefetched "
                    f"{pair.ttft_prefetched_s:.3f} s, {pair.cached_tokens} of "
                    f"{pair.prompt_tokens} tokens cached"
                )
        _say("killing A and starting it anew")
        a.stop()
        a = make_server(model, "a-again", store_url)
        with a, SessionClient(a.url) as again:
            found = is_found(again, seed)
    finally:
        a.stop()
        b.stop()
    result = summary(pairs, found_after_restart=found)
    record = {"pairs": [asdict(pair) for pair in pairs], **result}
    (RESULTS_DIR / "demo-redis.json").write_text(json.dumps(record, indent=1))
    print(json.dumps(result))
    return int(not (result["tokens_identical"] and found))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
