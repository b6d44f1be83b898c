"""What is served: a scaled trace, a pool that is too small for it, host memory.

``scenario()`` is all of it, for the live servers and for whoever wants to run the
same on a model of a server.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.demo.model import DEMO_MODEL, ModelSpec
from benchmarks.demo.server import BLOCK_SIZE, longest_blocks, pool_blocks
from benchmarks.demo.workload import TraceRow, Workload, build_workload, load_trace

NUM_ROWS = 160
TOKEN_DIVISOR = 24
#: Outputs shrink less than prompts: a time per token needs more than one of them.
OUTPUT_DIVISOR = 16
GAP_DIVISOR = 10.0
#: Of the peak live context.
POOL_FRACTION = 0.4
#: Host memory over the engine's own cache.
HOST_RATIO = 4

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One workload and the memory that it is served from.

    Attributes:
        rows: the scaled recording, one for each of the workload's turns.
        pool_blocks: of the engine's cache, without the null block.
        host_bytes: of each server that has host memory.
    """

    workload: Workload
    rows: tuple[TraceRow, ...]
    block_size: int
    block_bytes: int
    pool_blocks: int
    host_bytes: int

    @property
    def pool_tokens(self) -> int:
        return self.pool_blocks * self.block_size

    @property
    def host_tokens(self) -> int:
        return self.host_bytes // self.block_bytes * self.block_size

    def as_json(self) -> dict[str, object]:
        turns = self.workload.turns
        return {
            "requests": len(turns),
            "sessions": len({turn.session for turn in turns}),
            "prompt_tokens": sum(turn.num_prompt_tokens for turn in turns),
            "output_tokens": sum(turn.num_output_tokens for turn in turns),
            "peak_live_tokens": self.workload.peak_live_tokens,
            "shared_tokens": self.workload.shared_tokens,
            "block_size": self.block_size,
            "block_bytes": self.block_bytes,
            "pool_blocks": self.pool_blocks,
            "pool_tokens": self.pool_tokens,
            "host_bytes": self.host_bytes,
            "host_tokens": self.host_tokens,
        }


def scenario(num_rows: int = NUM_ROWS) -> Scenario:
    """The first rows of the trace, as the live servers get them."""
    trace = load_trace()
    workload = build_workload(
        trace,
        num_rows=num_rows,
        token_divisor=TOKEN_DIVISOR,
        gap_divisor=GAP_DIVISOR,
        vocab_size=DEMO_MODEL.vocab_size,
        output_divisor=OUTPUT_DIVISOR,
    )
    block_bytes = bytes_of_block(DEMO_MODEL)
    # An engine does not start on a pool that is too small for a request.
    num_blocks = max(pool_blocks(workload, POOL_FRACTION) - 1, longest_blocks(workload))
    return Scenario(
        workload=workload,
        rows=tuple(_scaled(row) for row in trace[:num_rows]),
        block_size=BLOCK_SIZE,
        block_bytes=block_bytes,
        pool_blocks=num_blocks,
        host_bytes=HOST_RATIO * num_blocks * block_bytes,
    )


def bytes_of_block(model: ModelSpec) -> int:
    """Keys and values of all layers, as the servers' float32 makes them."""
    head_size = model.hidden_size // model.num_heads
    per_token = 2 * model.num_layers * model.num_kv_heads * head_size * _FLOAT32_BYTES
    return per_token * BLOCK_SIZE


def _scaled(row: TraceRow) -> TraceRow:
    return replace(
        row,
        start_s=row.start_s / GAP_DIVISOR,
        end_s=row.end_s / GAP_DIVISOR,
        input_tokens=row.input_tokens // TOKEN_DIVISOR,
        output_tokens=max(1, row.output_tokens // OUTPUT_DIVISOR),
    )
