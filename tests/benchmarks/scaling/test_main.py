from __future__ import annotations

import json

import pytest

pytest.importorskip("redis")

from benchmarks.scaling import __main__ as program
from benchmarks.scaling.fleet import Fleet
from benchmarks.store_bandwidth import servers

_SMALL = Fleet(tokens=32_768, share_stored=0.0001)


@pytest.mark.redis
@pytest.mark.timeout(120)
def test_last_line_is_one_json_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not servers.binaries():
        pytest.skip("there is no server here")
    monkeypatch.setattr(program, "FLEETS", {"one_in_a_hundred": _SMALL})
    flags = ["--json", "--keys", "1000", "--rounds", "1", "--prefixes", "3"]
    assert program.main(flags) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["measured"]) == set(servers.binaries())
    for papers in found["on_paper"].values():
        assert papers["one_in_a_hundred"]["shards"] > 0
    assert {"refreshes", "reads_of_shared_prefixes", "machine"} <= set(found)


def test_without_a_server_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "binaries", dict)
    with pytest.raises(SystemExit):
        program.main([])
    assert "redis-server" in capsys.readouterr().err
