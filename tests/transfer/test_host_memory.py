from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from sam_connector.transfer.host_memory import available_bytes


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(
        "MemTotal:       100 kB\nMemAvailable:   50 kB\nHugePages_Total:  0\n\nX\n"
    )
    return path


def _cgroup(path: Path, limit: str, used: int, inactive_file: int) -> Path:
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{used}\n")
    (path / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\n")
    return path


def test_the_machine_is_the_limit(tmp_path: Path, meminfo: Path) -> None:
    cgroup = _cgroup(tmp_path, "max", 10, 0)
    assert available_bytes(meminfo=meminfo, cgroup=cgroup) == 50 * 1024
    cgroup = _cgroup(tmp_path, "9999999", 10, 0)
    assert available_bytes(meminfo=meminfo, cgroup=cgroup) == 50 * 1024


def test_the_container_is_the_limit(tmp_path: Path, meminfo: Path) -> None:
    cgroup = _cgroup(tmp_path, "30000", 20000, 5000)
    assert available_bytes(meminfo=meminfo, cgroup=cgroup) == 15000


def test_a_container_over_its_limit_has_nothing(tmp_path: Path, meminfo: Path) -> None:
    cgroup = _cgroup(tmp_path, "30000", 40000, 0)
    assert available_bytes(meminfo=meminfo, cgroup=cgroup) == 0


def test_other_systems_do_not_say(tmp_path: Path) -> None:
    assert available_bytes(meminfo=tmp_path / "no", cgroup=tmp_path) is None
