from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm")

from benchmarks.store_bandwidth import __main__ as program
from benchmarks.store_bandwidth.__main__ import LARGE, Row, summary

MIB = 1 << 20


def row(size: int, ours: float, limit: float, library: float) -> Row:
    rates = {"limit": limit, "ours": ours, "library": library, "slower": library / 2}
    return Row(
        server="redis",
        size=size,
        num_connections=1,
        set_rates=rates,
        get_rates={name: 2 * rate for name, rate in rates.items()},
        redis_benchmark=None,
    )


def test_ratios_are_to_the_limit_and_to_the_best_library() -> None:
    assert row(LARGE, ours=3.0, limit=4.0, library=2.0).ratios() == {
        "get_vs_limit": 0.75,
        "get_vs_best_library": 1.5,
        "set_vs_limit": 0.75,
        "set_vs_best_library": 1.5,
    }


def test_the_summary_is_about_large_values_only() -> None:
    found = summary(
        [
            row(64 << 10, ours=1.0, limit=100.0, library=100.0),
            row(LARGE, ours=3.0, limit=4.0, library=2.0),
            row(LARGE, ours=2.0, limit=4.0, library=2.0),
            row(LARGE, ours=4.0, limit=4.0, library=2.0),
        ]
    )
    assert found["get_vs_limit"] == 0.75
    assert found["get_vs_limit_least"] == 0.5
    assert found["set_vs_best_library"] == 1.5
    assert found["set_vs_best_library_least"] == 1.0


def test_without_libraries_there_is_only_the_limit() -> None:
    rates = {"limit": 4.0, "ours": 3.0}
    alone = Row(
        server="redis",
        size=LARGE,
        num_connections=1,
        set_rates=rates,
        get_rates=rates,
        redis_benchmark=None,
    )
    assert set(alone.ratios()) == {"get_vs_limit", "set_vs_limit"}
    assert "get_vs_best_library" not in summary([alone])


@pytest.mark.vllm
@pytest.mark.redis
@pytest.mark.timeout(120)
def test_last_line_is_one_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not program.servers.binaries():
        pytest.skip("there is no server here")
    monkeypatch.setattr(program, "SIZES", (64 << 10, LARGE))
    monkeypatch.setattr(program, "CONNECTIONS", (2,))
    assert program.main(["--quick", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"get_vs_limit", "set_vs_limit"} <= set(found)
    names = set(program.servers.binaries())
    assert {each["server"] for each in found["rows"]} == names
    assert {each["size"] for each in found["rows"]} == {64 << 10, LARGE}
    assert {f"{name}-server" for name in names} <= set(found["versions"])
    for rates in found["whole_path_gb_s"].values():
        assert rates["out_slowest_leg"] == min(
            rates["block_to_slot"], rates["slot_to_store"]
        )
