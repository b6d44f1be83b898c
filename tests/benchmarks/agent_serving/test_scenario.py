from __future__ import annotations

import pytest

from benchmarks.agent_serving.__main__ import MIN_ROWS
from benchmarks.agent_serving.scenario import HOST_RATIO, bytes_of_block, scenario
from benchmarks.demo.model import ModelSpec
from benchmarks.demo.server import longest_blocks


@pytest.mark.parametrize("num_rows", [MIN_ROWS, 100, 200])
def test_the_longest_request_fits_and_all_that_is_alive_does_not(num_rows: int) -> None:
    planned = scenario(num_rows)
    assert len(planned.workload.turns) == num_rows
    assert planned.pool_blocks >= longest_blocks(planned.workload)
    assert planned.pool_tokens < 0.5 * planned.workload.peak_live_tokens


def test_host_memory_is_a_multiple_of_the_pool() -> None:
    planned = scenario()
    assert planned.host_tokens == HOST_RATIO * planned.pool_tokens
    assert planned.pool_tokens == planned.pool_blocks * planned.block_size


def test_rows_and_turns_are_the_same_requests() -> None:
    planned = scenario()
    for row, turn in zip(planned.rows, planned.workload.turns, strict=True):
        assert row.session == turn.session
        assert row.input_tokens == turn.num_prompt_tokens
        assert row.output_tokens == turn.num_output_tokens


def test_pauses_of_rows_and_turns_are_the_same() -> None:
    planned = scenario()
    rows = planned.rows
    for turn in planned.workload.turns:
        if turn.wait_for:
            since = max(rows[i].end_s for i in turn.wait_for)
            gap_s = rows[turn.index].start_s - since
            assert turn.gap_s == pytest.approx(gap_s, abs=1e-6)


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    model = ModelSpec(hidden_size=64, num_heads=4, num_kv_heads=2, num_layers=3)
    assert bytes_of_block(model) == 2 * 3 * 2 * 16 * 4 * 32


def test_the_json_says_what_was_served() -> None:
    out = scenario().as_json()
    assert out["requests"] == 160
    assert out["sessions"] == 11
    assert out["host_bytes"] == HOST_RATIO * int(str(out["pool_blocks"])) * 393_216
