from __future__ import annotations

import json
from pathlib import Path

from benchmarks.demo.server import (
    HOST_BYTES,
    ServerKind,
    demo_workload,
    make_server,
    server_args,
)
from sam_connector.config import SamConfig, SavePolicy


def config_of(kind: ServerKind) -> SamConfig:
    flags = kind.flags()
    transfer = json.loads(flags[flags.index("--kv-transfer-config") + 1])
    return SamConfig.from_extra_config(transfer["kv_connector_extra_config"])


def test_the_stock_server_has_no_connector() -> None:
    assert ServerKind.STOCK.flags() == []


def test_both_of_ours_have_the_same_host_memory_and_only_one_saves_everything() -> None:
    tier, hints = config_of(ServerKind.TIER), config_of(ServerKind.HINTS)
    assert tier.host.host_bytes == hints.host.host_bytes == HOST_BYTES
    assert tier.host.save_policy is SavePolicy.ALL
    assert hints.host.save_policy is SavePolicy.HINTED


def test_wrong_hints_come_to_the_same_server() -> None:
    assert config_of(ServerKind.WRONG) == config_of(ServerKind.HINTS)


def test_host_memory_can_be_another() -> None:
    flags = ServerKind.TIER.flags(64 << 20)
    transfer = json.loads(flags[flags.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"]["host_bytes"] == 64 << 20


def test_servers_of_one_pool_keep_their_logs_apart() -> None:
    workload = demo_workload(num_rows=20)
    logs = {
        make_server(Path("model"), workload, 165, kind=kind).log_path
        for kind in ServerKind
    }
    assert len(logs) == len(ServerKind)


def test_the_pool_size_is_a_flag_of_all() -> None:
    args = server_args(demo_workload(num_rows=20), 165)
    assert args[args.index("--num-gpu-blocks-override") + 1] == "165"
