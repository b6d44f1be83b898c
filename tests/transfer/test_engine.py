from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from sam_connector.transfer import engine, make_copy_engine
from sam_connector.transfer.cpu_engine import CpuCopyEngine
from tests.transfer.memory import CPU, Memory, separate


def test_a_cpu_gets_the_cpu_engine() -> None:
    memory = Memory(separate([64]))
    made = make_copy_engine(memory.groups, memory.layout, memory.pool, device=CPU)
    assert isinstance(made, CpuCopyEngine)
    made.close()


def test_other_devices_get_none() -> None:
    memory = Memory(separate([64]))
    for region in ({0: [memory.groups[0][0].to("meta")]},):
        with pytest.raises(ValueError, match="no copy engine for a meta device"):
            make_copy_engine(
                region, memory.layout, memory.pool, device=torch.device("meta")
            )


def test_regions_lie_on_the_device() -> None:
    memory = Memory(separate([64]))
    with pytest.raises(ValueError, match="group 0 lies on cpu, not on cuda"):
        make_copy_engine(
            memory.groups, memory.layout, memory.pool, device=torch.device("cuda", 0)
        )


def test_a_gpu_needs_a_pinned_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(separate([64]))
    monkeypatch.setattr(engine, "_check_device", lambda groups, device: None)
    with pytest.raises(ValueError, match="pinned"):
        make_copy_engine(
            memory.groups, memory.layout, memory.pool, device=torch.device("cuda", 0)
        )


def test_the_words_of_the_port_are_here() -> None:
    assert {
        "CopyEngine",
        "CopyJob",
        "Direction",
        "GroupCopy",
        "JobResult",
        "make_copy_engine",
    } == set(engine.__all__)
