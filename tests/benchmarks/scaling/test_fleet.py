from __future__ import annotations

import dataclasses

import pytest

from benchmarks.scaling.fleet import Fleet, Measured, on_paper
from sam_connector.storage.frame import HEADER_BYTES

SMALL = Fleet(
    num_sessions=1_000,
    num_instances=10,
    tokens=100,
    shared_tokens=20,
    num_prefixes=50,
    bytes_per_token=1_000,
    block_tokens=10,
    mean_wait_s=100.0,
    keep_alive_s=10.0,
    shard_bytes=10_000_000,
)
MEASURED = Measured(
    key_bytes=100.0,
    value_memory_bytes=12_000.0,
    touch_server_us=2.0,
    touch_client_us=50.0,
    touch_wire_bytes=200.0,
    exists_client_us=20.0,
    script_server_us=1.0,
    script_client_us=1.0,
    script_wire_bytes=100.0,
    cluster_set_gb_s=0.5,
    cluster_get_gb_s=1.0,
    manifest_bytes=1_000,
    tracker_bytes=200.0,
)


def test_shared_blocks_are_stored_once() -> None:
    assert SMALL.own_blocks == 8
    assert SMALL.num_blocks == 10
    assert SMALL.value_bytes == 10_000 + HEADER_BYTES
    assert SMALL.num_keys == 1_000 * 8 + 50 * 2
    half = dataclasses.replace(SMALL, share_stored=0.5)
    assert half.num_keys == 500 * 8 + 50 * 2


def test_an_instance_tracks_its_sessions_and_their_prefixes() -> None:
    assert SMALL.tracked_per_instance == 100 * 8 + 50 * 2
    few = dataclasses.replace(SMALL, share_stored=0.01)
    assert few.tracked_per_instance == 1 * 8 + 1 * 2


def test_costs_follow_from_what_was_measured() -> None:
    found = on_paper(SMALL, MEASURED)
    memory = 8_100 * 12_100
    assert found["memory_tb"] == pytest.approx(memory / 1e12)
    assert found["data_tb"] == pytest.approx(8_100 * 10_000 / 1e12)
    assert found["manifests_tb"] == pytest.approx(1e6 / 1e12)
    assert found["shards"] == 10  # 99.01 MB
    assert found["refreshed_per_s_millions"] == pytest.approx(900e-6)
    assert found["refresh_cores_per_instance"] == pytest.approx(90 * 50e-6)
    assert found["refresh_cores_per_shard"] == pytest.approx(900 * 2e-6 / 10)
    assert found["sessions_moved_per_s"] == 10
    assert found["written_gb_s"] == pytest.approx(10 * 8 * SMALL.value_bytes / 1e9)
    assert found["read_gb_s"] == pytest.approx(10 * 10 * SMALL.value_bytes / 1e9)
    assert found["read_a_session_s"] == pytest.approx(10 * SMALL.value_bytes / 1e9)
    assert found["look_a_session_up_ms"] == pytest.approx(0.2)


def test_a_longer_interval_costs_less_and_moves_as_much() -> None:
    often = on_paper(SMALL, MEASURED)
    seldom = on_paper(dataclasses.replace(SMALL, keep_alive_s=100.0), MEASURED)
    for name in ("refresh_cores_per_instance", "refresh_network_gb_s"):
        assert seldom[name] == pytest.approx(often[name] / 10)
    assert seldom["written_gb_s"] == often["written_gb_s"]


def test_the_fleet_of_the_document_is_the_one_that_was_asked_for() -> None:
    fleet = Fleet()
    assert (fleet.num_sessions, fleet.num_instances, fleet.tokens) == (
        1_000_000,
        100,
        65_536,
    )
    assert fleet.block_bytes == 2 << 20
