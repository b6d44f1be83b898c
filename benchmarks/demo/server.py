"""The servers that are compared, equal in all flags but those that say what."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.common import RESULTS_DIR, VllmServer, sam_flags
from benchmarks.demo.client import MODEL_NAME
from benchmarks.demo.identity import NUM_OUTPUT_TOKENS
from benchmarks.demo.model import DEMO_MODEL
from benchmarks.demo.workload import Workload, build_workload, load_trace

BLOCK_SIZE = 32
#: Host memory of each of our servers; a block of the demo's model is 384 KiB.
HOST_BYTES = 192 << 20


class ServerKind(enum.StrEnum):
    """What serves the agents."""

    #: vLLM as it comes.
    STOCK = "stock"
    #: Ours, told nothing: saves every block to host memory, a plain offloading cache.
    TIER = "tier"
    #: Ours, told what the agents' harness knows.
    HINTS = "hints"
    #: As ``HINTS``; some of its agents say what is wrong. No part of the demo.
    WRONG = "wrong"

    def flags(self, host_bytes: int = HOST_BYTES) -> list[str]:
        """What this server is started with beside the flags of all of them."""
        if self is ServerKind.STOCK:
            return []
        config: dict[str, object] = {"host_bytes": host_bytes}
        if self is ServerKind.TIER:
            config["save_policy"] = "all"
        return sam_flags(config)


def demo_workload(num_rows: int = 200) -> Workload:
    """The first rows of the trace, a sixteenth in tokens and a tenth in gaps."""
    return build_workload(
        load_trace(),
        num_rows=num_rows,
        token_divisor=16,
        gap_divisor=10.0,
        vocab_size=DEMO_MODEL.vocab_size,
    )


def pool_blocks(workload: Workload, fraction: float) -> int:
    """Blocks that hold ``fraction`` of the peak live context, and the null block."""
    return round(workload.peak_live_tokens * fraction / BLOCK_SIZE) + 1


def longest_blocks(workload: Workload) -> int:
    """Blocks of the longest request, whichever way it is served."""
    longest = max(
        turn.num_prompt_tokens + max(turn.num_output_tokens, NUM_OUTPUT_TOKENS)
        for turn in workload.turns
    )
    return -(-longest // BLOCK_SIZE)


def server_args(workload: Workload, num_blocks: int) -> list[str]:
    """What all servers are started with.

    float32, because with bfloat16 the stock server's own greedy tokens depend on how
    much of a prompt it found in its cache (in 4 of 26 trials on the CPU build; none
    of 26 with float32), and then no comparison of tokens would mean anything.
    """
    max_model_len = longest_blocks(workload) * BLOCK_SIZE
    return [
        *("--served-model-name", MODEL_NAME),
        *("--dtype", "float32"),
        *("--block-size", str(BLOCK_SIZE)),
        *("--num-gpu-blocks-override", str(num_blocks)),
        *("--max-model-len", str(max_model_len)),
        *("--max-num-seqs", "16"),
        *("--max-num-batched-tokens", "2048"),
        *("--uvicorn-log-level", "warning"),
        "--enforce-eager",
        "--enable-prompt-tokens-details",
    ]


def make_server(
    model: Path,
    workload: Workload,
    num_blocks: int,
    *,
    kind: ServerKind,
    host_bytes: int = HOST_BYTES,
    port: int | None = None,
) -> VllmServer:
    return VllmServer(
        model,
        [*server_args(workload, num_blocks), *kind.flags(host_bytes)],
        log_path=RESULTS_DIR / f"demo-server-{kind}-{num_blocks}.log",
        port=port,
    )


@contextmanager
def running(servers: Iterable[VllmServer]) -> Iterator[None]:
    """All servers, started side by side, for as long as the context lasts."""
    with ExitStack() as stack:
        started = []
        for server in servers:
            stack.callback(server.stop)
            started.append(server.launch())
        for server in started:
            server.wait_healthy()
        yield
