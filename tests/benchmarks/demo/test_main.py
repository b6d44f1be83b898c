from __future__ import annotations

import pytest

from benchmarks.demo.__main__ import expected_s, main, summary
from benchmarks.demo.identity import IdentityRecord
from benchmarks.demo.pool_run import DEMO_ARMS
from benchmarks.demo.server import HOST_BYTES, ServerKind
from tests.benchmarks.demo.numbers import pool

POOLS = {"one_third": pool(stock=(2.0,)), "two_thirds": pool(label="2/3")}


def record(token: int) -> IdentityRecord:
    return IdentityRecord(tokens={62: [token]}, cached_tokens=5, loaded_bytes=9)


def test_the_last_line_has_the_first_pools_numbers_and_every_pools() -> None:
    tokens = {kind: record(1) for kind in DEMO_ARMS}
    out = summary(POOLS, tokens, num_repeats=3, total_s=1.0)
    assert out["ttft_ratio"] == 0.5
    pools = out["pools"]
    assert isinstance(pools, dict)
    assert [pools[key]["ttft_ratio"] for key in POOLS] == [0.5, 1.0]
    assert out["host_bytes"] == HOST_BYTES
    assert out["repeats"] == 3
    assert out["tokens_identical"] is True
    assert out["tokens_compared_requests"] == 1
    assert out["identity_cached_tokens_hints"] == 5
    assert "sam_stats" not in out
    assert {f"{name}_tier" for name in ("cached_rate", "bytes_moved")} <= set(out)


def test_one_server_with_another_token_is_not_identical() -> None:
    tokens = {kind: record(kind is ServerKind.TIER) for kind in DEMO_ARMS}
    out = summary(POOLS, tokens, num_repeats=3, total_s=1.0)
    assert out["tokens_identical"] is False


def test_tokens_that_were_not_compared_are_not_called_identical() -> None:
    out = summary(POOLS, {}, num_repeats=3, total_s=1.0)
    assert (out["tokens_identical"], out["tokens_compared_requests"]) == (False, 0)


def test_the_whole_demo_is_expected_to_take_a_quarter_of_an_hour() -> None:
    both = ("one_third", "two_thirds")
    assert expected_s(both, 3, identity=True) <= 15 * 60
    assert expected_s(both, 1, identity=True) < expected_s(both, 3, identity=True)
    assert expected_s(both, 3, identity=False) < expected_s(both, 3, identity=True)


@pytest.mark.parametrize("text", ["0", "-1", "x"])
def test_no_repeat_at_all_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--repeats", text])
    assert "must be a number from 1" in capsys.readouterr().err
