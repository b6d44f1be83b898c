from __future__ import annotations

import socket
from pathlib import Path

import pytest
import redis

from benchmarks.store_bandwidth import servers

pytestmark = pytest.mark.redis


def test_a_server_runs_until_its_end(binary: str) -> None:
    with servers.running(binary) as port, redis.Redis(port=port) as client:
        assert client.ping()
        assert client.config_get("save")["save"] == ""
        assert client.config_get("appendonly")["appendonly"] == "no"
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_arguments_are_the_servers(binary: str) -> None:
    with (
        servers.running(binary, "--maxclients", "17") as port,
        redis.Redis(port=port) as client,
    ):
        assert client.config_get("maxclients")["maxclients"] == "17"


def test_a_server_is_told_to_keep_freed_memory(binary: str, tmp_path: Path) -> None:
    # Servers write their title over their environment, so it is kept before.
    wrapped = tmp_path / "server"
    wrapped.write_text(f'#!/bin/sh\nenv > {tmp_path}/env\nexec {binary} "$@"\n')
    wrapped.chmod(0o755)
    with servers.running(str(wrapped)):
        variables = (tmp_path / "env").read_text()
    assert "dirty_decay_ms:-1" in variables
    assert "MALLOC_TRIM_THRESHOLD_=" in variables


def test_a_server_that_does_not_start_is_told(
    binary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_MAX_START_S", 0.2)
    with (
        pytest.raises(RuntimeError, match="did not start"),
        servers.running(binary, "--no-such-setting", "1"),
    ):
        pass


def test_versions_are_numbers(binary: str) -> None:
    major, *_ = servers.version(binary).split(".")
    assert int(major) >= 6


def test_the_servers_own_benchmark_has_both_rates(port: int) -> None:
    rates = servers.benchmark(port, 65_536, 1)
    if rates is None:
        pytest.skip("there is no redis-benchmark here")
    assert set(rates) == {"set", "get"}
    assert all(rate > 0 for rate in rates.values())
