"""The port between a copy engine and the streams of a device, and CUDA behind it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from sam_connector.transfer.contract import Direction
from sam_connector.transfer.cuda_driver import (
    ACCESS_ANY,
    ACCESS_STREAM,
    CopyCall,
    load_copy_call,
)
from sam_connector.transfer.layout import Descriptors

#: Untyped: builds of torch without CUDA describe stand-ins for its streams.
_cuda: Any = torch.cuda


class Mark(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the device has got past it; raises when the device has failed."""


class CopyDevice(Protocol):
    """One stream per direction. Everything but ``synchronize`` returns at once."""

    def mark_current(self) -> Mark:
        """The end of what is on the calling thread's current stream now."""

    def bind_thread(self) -> None:
        """Called once by the thread that makes all calls below."""

    def wait(self, direction: Direction, mark: Mark) -> None:
        """What is queued on this direction's stream from now on follows ``mark``."""

    def copy(
        self, direction: Direction, descriptors: Descriptors, *, is_stable: bool
    ) -> None:
        """Queues copies.

        Args:
            direction: whose stream.
            descriptors: what to copy, in no order.
            is_stable: nothing that was queued before writes the sources, so that they
                may be read before it is done.
        """

    def mark(self, direction: Direction) -> Mark:
        """The end of what is queued on this direction's stream."""

    def synchronize(self, direction: Direction) -> None:
        """Waits for everything queued on this direction's stream; any thread."""


class CudaDevice:
    """Two streams of the lowest priority, so that copies give way to the model.

    Args:
        device: the GPU.
        copy_call: instead of what the driver offers.
    """

    def __init__(
        self, device: torch.device, *, copy_call: CopyCall | None = None
    ) -> None:
        self._device = device
        lowest, _ = _cuda.Stream.priority_range()
        self._streams = {
            direction: _cuda.Stream(device, priority=lowest) for direction in Direction
        }
        self._copy_call = copy_call or load_copy_call()

    def mark_current(self) -> Mark:
        return _recorded(_cuda.current_stream(self._device))

    def bind_thread(self) -> None:
        _cuda.set_device(self._device)

    def wait(self, direction: Direction, mark: Mark) -> None:
        self._streams[direction].wait_event(mark)

    def copy(
        self, direction: Direction, descriptors: Descriptors, *, is_stable: bool
    ) -> None:
        if not len(descriptors):
            return
        sources, targets = descriptors.device, descriptors.host
        if direction is Direction.LOAD:
            sources, targets = targets, sources
        self._copy_call(
            targets,
            sources,
            descriptors.sizes,
            access_order=ACCESS_ANY if is_stable else ACCESS_STREAM,
            stream=self._streams[direction].cuda_stream,
        )

    def mark(self, direction: Direction) -> Mark:
        return _recorded(self._streams[direction])

    def synchronize(self, direction: Direction) -> None:
        self._streams[direction].synchronize()


def _recorded(stream: Any) -> Mark:
    event = _cuda.Event()
    event.record(stream)
    mark: Mark = event
    return mark
