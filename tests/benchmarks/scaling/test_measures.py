from __future__ import annotations

import pytest

pytest.importorskip("redis")

from benchmarks.scaling import measures
from benchmarks.scaling.fleet import Fleet
from benchmarks.store_bandwidth import servers
from sam_connector.pooling.manifest import ManifestLimits
from sam_connector.storage.key import StoreKey

FLEET = Fleet(tokens=320, shared_tokens=160)


@pytest.mark.redis
@pytest.mark.timeout(60)
@pytest.mark.parametrize("server", ["redis", "valkey"])
def test_a_real_server_is_measured(server: str) -> None:
    binary = servers.binaries().get(server)
    if binary is None:
        pytest.skip(f"there is no {server} server here")
    found = measures.measure(binary, FLEET, num_keys=2_000, rounds=2)
    assert 100 < found.key_bytes < 1_000
    assert FLEET.value_bytes <= found.value_memory_bytes < 1.5 * FLEET.value_bytes
    # The name itself, in each of the two commands that a cluster is sent.
    name_bytes = len(str(measures.store_key(0)))
    assert found.touch_wire_bytes > 2 * name_bytes
    assert name_bytes < found.script_wire_bytes < 2 * name_bytes
    assert found.touch_client_us > 0
    assert found.exists_client_us > 0
    assert found.cluster_set_gb_s > 0
    assert found.cluster_get_gb_s > 0


def test_names_are_the_connectors() -> None:
    names = {str(measures.store_key(index)) for index in range(100)}
    assert len(names) == 100
    for name in names:
        assert str(StoreKey.parse(name)) == name


def test_a_manifest_grows_with_its_blocks() -> None:
    small, large = (
        measures.manifest_bytes(Fleet(tokens=tokens)) for tokens in (16, 16_016)
    )
    assert large - small == pytest.approx(1_000 * 32, abs=16)
    assert large < ManifestLimits().max_bytes


def test_a_tracked_chunk_has_its_hash_and_its_places() -> None:
    per_chunk = measures.tracker_bytes(num_chunks=2_000, per_session=100)
    assert 65 < per_chunk < 1_000
