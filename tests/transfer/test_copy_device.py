"""What CUDA's streams are told, with streams that only remember."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from sam_connector.transfer import copy_device
from sam_connector.transfer.contract import Direction
from sam_connector.transfer.copy_device import CudaDevice
from sam_connector.transfer.cuda_driver import ACCESS_ANY, ACCESS_STREAM
from sam_connector.transfer.layout import Descriptors

GPU = torch.device("cuda", 1)


class _Event:
    def __init__(self) -> None:
        self.stream: _Stream | None = None

    def record(self, stream: _Stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return True


class _Stream:
    made: list[_Stream]

    def __init__(self, device: torch.device, priority: int) -> None:
        assert device == GPU
        self.priority = priority
        self.cuda_stream = 1000 + len(_Stream.made)
        self.waits: list[object] = []
        self.num_synchronized = 0
        _Stream.made.append(self)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -5)

    def wait_event(self, event: object) -> None:
        self.waits.append(event)

    def synchronize(self) -> None:
        self.num_synchronized += 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    _Stream.made = []
    monkeypatch.setattr(
        copy_device,
        "_cuda",
        SimpleNamespace(
            Stream=_Stream,
            Event=_Event,
            current_stream=lambda device: ("current", device),
            set_device=lambda device: None,
        ),
    )
    return []


@pytest.fixture
def device(calls: list[dict[str, Any]]) -> CudaDevice:
    def call(targets: Any, sources: Any, sizes: Any, **rest: Any) -> None:
        lists = {"targets": targets, "sources": sources, "sizes": sizes}
        calls.append({**{k: v.tolist() for k, v in lists.items()}, **rest})

    return CudaDevice(GPU, copy_call=call)


def _descriptors() -> Descriptors:
    one = np.array([1], dtype=np.int64)
    return Descriptors(device=one * 10, host=one * 20, sizes=one * 64)


def test_each_direction_has_a_stream_of_the_lowest_priority(device: CudaDevice) -> None:
    assert [stream.priority for stream in _Stream.made] == [0, 0]
    marks = {device.mark(direction).stream for direction in Direction}  # type: ignore[attr-defined]
    assert marks == set(_Stream.made)


def test_the_current_stream_is_that_of_the_device(device: CudaDevice) -> None:
    assert device.mark_current().stream == ("current", GPU)  # type: ignore[attr-defined]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("is_stable", [True, False])
def test_copies_go_the_right_way_on_their_stream(
    device: CudaDevice,
    calls: list[dict[str, Any]],
    direction: Direction,
    is_stable: bool,
) -> None:
    device.copy(direction, _descriptors(), is_stable=is_stable)
    is_store = direction is Direction.STORE
    assert calls == [
        {
            "targets": [20] if is_store else [10],
            "sources": [10] if is_store else [20],
            "sizes": [64],
            "access_order": ACCESS_ANY if is_stable else ACCESS_STREAM,
            "stream": device.mark(direction).stream.cuda_stream,  # type: ignore[attr-defined]
        }
    ]


def test_an_empty_list_is_no_call(
    device: CudaDevice, calls: list[dict[str, Any]]
) -> None:
    device.copy(Direction.STORE, Descriptors.concatenate([]), is_stable=False)
    assert calls == []


def test_waiting_and_synchronizing_are_the_streams_own(device: CudaDevice) -> None:
    mark = device.mark_current()
    device.bind_thread()
    device.wait(Direction.LOAD, mark)
    device.synchronize(Direction.LOAD)
    stream = device.mark(Direction.LOAD).stream  # type: ignore[attr-defined]
    assert (stream.waits, stream.num_synchronized) == ([mark], 1)
