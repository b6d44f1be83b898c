"""The deployment on paper, and what it costs, from what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from sam_connector.storage.frame import HEADER_BYTES

GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Engines, their sessions, and the cluster behind them.

    Attributes:
        num_sessions: live, all instances together.
        num_instances: engines.
        tokens: per session.
        shared_tokens: of them a prefix that others have too (system prompt, tools).
        num_prefixes: different ones of those.
        bytes_per_token: of KV cache; 128 KiB is an 8B model with grouped queries.
        block_tokens: per block.
        share_stored: of the sessions, how many are in the store at a time: those that
            wait for long, not those that are being served.
        mean_wait_s: how long one is there before it is read again.
        keep_alive_s: between two refreshes.
        shard_bytes: memory of one server of the cluster.
    """

    num_sessions: int = 1_000_000
    num_instances: int = 100
    tokens: int = 65_536
    shared_tokens: int = 16_384
    num_prefixes: int = 1_000
    bytes_per_token: int = 128 << 10
    block_tokens: int = 16
    share_stored: float = 1.0
    mean_wait_s: float = 600.0
    keep_alive_s: float = 60.0
    shard_bytes: int = 256 << 30

    @property
    def block_bytes(self) -> int:
        """One block, on one rank; a value without its header."""
        return self.block_tokens * self.bytes_per_token

    @property
    def value_bytes(self) -> int:
        """No grouping and no cutting at these sizes."""
        return self.block_bytes + HEADER_BYTES

    @property
    def num_stored(self) -> int:
        return round(self.num_sessions * self.share_stored)

    @property
    def own_blocks(self) -> int:
        """Of a session, that nobody else has."""
        return (self.tokens - self.shared_tokens) // self.block_tokens

    @property
    def num_blocks(self) -> int:
        """Of a session."""
        return self.tokens // self.block_tokens

    @property
    def num_keys(self) -> int:
        shared = self.shared_tokens // self.block_tokens
        return self.num_stored * self.own_blocks + self.num_prefixes * shared

    @property
    def tracked_per_instance(self) -> int:
        """Chunks; each instance has its share of the sessions, and of all prefixes
        as many as it has sessions, at most."""
        sessions = self.num_stored / self.num_instances
        shared = self.shared_tokens // self.block_tokens
        return round(
            sessions * self.own_blocks + min(sessions, self.num_prefixes) * shared
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one server was found to need; see ``measures.py``.

    Attributes:
        key_bytes: memory of a key beside its value.
        value_memory_bytes: what a server counts for a value of ``Fleet.value_bytes``;
            its allocator has sizes of its own.
        touch_server_us: of a server's CPU, to refresh a key of a cluster.
        touch_client_us: of an engine's CPU, for the same.
        touch_wire_bytes: sent for the same.
        exists_client_us: of an engine's CPU, to look a key of a cluster up.
        script_server_us: of the CPU of a server that is no cluster, per key.
        script_client_us: of an engine's CPU, for the same.
        script_wire_bytes: sent for the same.
        cluster_set_gb_s: one thread writing values of 2 MiB to a cluster.
        cluster_get_gb_s: one thread reading them.
        manifest_bytes: of a session of ``Fleet.tokens``.
        tracker_bytes: memory of an instance for each chunk it tracks.
    """

    key_bytes: float
    value_memory_bytes: float
    touch_server_us: float
    touch_client_us: float
    touch_wire_bytes: float
    exists_client_us: float
    script_server_us: float
    script_client_us: float
    script_wire_bytes: float
    cluster_set_gb_s: float
    cluster_get_gb_s: float
    manifest_bytes: int
    tracker_bytes: float


def on_paper(fleet: Fleet, measured: Measured) -> dict[str, float]:
    """What the fleet costs the cluster and its engines."""
    memory = fleet.num_keys * (measured.value_memory_bytes + measured.key_bytes)
    manifests = fleet.num_sessions * measured.manifest_bytes
    num_shards = -(-(memory + manifests) // fleet.shard_bytes)
    # A shared key is refreshed by every instance that has a session with it.
    refreshed = fleet.tracked_per_instance / fleet.keep_alive_s
    all_refreshed = refreshed * fleet.num_instances
    moved = fleet.num_stored / fleet.mean_wait_s
    written = moved * fleet.own_blocks * fleet.value_bytes
    read = moved * fleet.num_blocks * fleet.value_bytes
    session_bytes = fleet.num_blocks * fleet.value_bytes
    return {
        "keys_millions": fleet.num_keys / 1e6,
        "data_tb": fleet.num_keys * fleet.block_bytes / 1e12,
        "memory_tb": memory / 1e12,
        "key_overhead_tb": fleet.num_keys * measured.key_bytes / 1e12,
        "manifests_tb": manifests / 1e12,
        "shards": num_shards,
        "chunks_per_instance_millions": fleet.tracked_per_instance / 1e6,
        "tracker_gb_per_instance": (
            fleet.tracked_per_instance * measured.tracker_bytes / GB
        ),
        "refreshed_per_s_millions": all_refreshed / 1e6,
        "refresh_cores_per_instance": refreshed * measured.touch_client_us / 1e6,
        "refresh_cores_per_shard": (
            all_refreshed * measured.touch_server_us / 1e6 / num_shards
        ),
        "refresh_network_gb_s": all_refreshed * measured.touch_wire_bytes / GB,
        "sessions_moved_per_s": moved,
        "written_gb_s": written / GB,
        "read_gb_s": read / GB,
        "moved_gb_s_per_instance": (written + read) / GB / fleet.num_instances,
        "moved_gb_s_per_shard": (written + read) / GB / num_shards,
        "manifests_written_mb_s": moved * measured.manifest_bytes / 1e6,
        "read_a_session_s": session_bytes / GB / measured.cluster_get_gb_s,
        "look_a_session_up_ms": fleet.num_blocks * measured.exists_client_us / 1e3,
    }
