"""The calls' arguments and the choice between them, with functions of our own."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from sam_connector.transfer import cuda_driver
from sam_connector.transfer.cuda_driver import (
    ACCESS_ANY,
    BatchCopy,
    SingleCopies,
    find_function,
    load_copy_call,
    load_single_copies,
)

TARGETS = np.array([1 << 46, 2000], dtype=np.int64)
SOURCES = np.array([3000, (1 << 46) + 7], dtype=np.int64)
SIZES = np.array([64, 1 << 33], dtype=np.int64)


class _Driver:
    """A ``cuMemcpyBatchAsync`` of our own, which notes what it is given."""

    def __init__(self, code: int = 0) -> None:
        self.seen: list[Any] = []

        def call(
            targets: int,
            sources: int,
            sizes: int,
            count: int,
            attributes: Any,
            firsts: Any,
            num_attributes: int,
            failed: Any,
            stream: int,
        ) -> int:
            arrays = [
                list((ctypes.c_size_t * count).from_address(address))
                for address in (targets, sources, sizes)
            ]
            attribute = attributes[0]
            assert (firsts[0], num_attributes, attribute.flags) == (0, 1, 0)
            self.seen.append((*arrays, attribute.access_order, stream))
            failed[0] = 1
            return code

        self.function = cuda_driver._BATCH_TYPE(call)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value or 0


def test_a_batch_is_one_call_with_the_whole_list() -> None:
    driver = _Driver()
    BatchCopy(driver.address)(
        TARGETS, SOURCES, SIZES, access_order=ACCESS_ANY, stream=77
    )
    assert driver.seen == [
        (TARGETS.tolist(), SOURCES.tolist(), SIZES.tolist(), ACCESS_ANY, 77)
    ]


def test_a_batch_that_the_driver_refuses() -> None:
    copy = BatchCopy(_Driver(code=1).address)
    with pytest.raises(RuntimeError, match="CUDA error 1, copy 1 of 2"):
        copy(TARGETS, SOURCES, SIZES, access_order=ACCESS_ANY, stream=0)


def test_single_copies_are_a_call_each() -> None:
    seen: list[tuple[int, ...]] = []

    def call(*arguments: int) -> int:
        seen.append(arguments)
        return 0

    SingleCopies(call)(TARGETS, SOURCES, SIZES, access_order=1, stream=5)
    assert seen == [(1 << 46, 3000, 64, 5), (2000, (1 << 46) + 7, 1 << 33, 5)]


def test_a_single_copy_that_the_driver_refuses() -> None:
    codes = iter([0, 700])
    copies = SingleCopies(lambda *_: next(codes))
    with pytest.raises(RuntimeError, match="CUDA error 700, copy 1 of 2"):
        copies(TARGETS, SOURCES, SIZES, access_order=1, stream=5)


def test_the_batch_is_used_where_the_driver_has_it() -> None:
    driver = _Driver()
    asked: list[tuple[bytes, int]] = []

    def find(name: bytes, version: int) -> int:
        asked.append((name, version))
        return driver.address

    assert isinstance(load_copy_call(find=find), BatchCopy)
    assert asked == [(b"cuMemcpyBatchAsync", 12080)]


def test_single_copies_are_used_where_it_has_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    library = SimpleNamespace(cuMemcpyAsync=SimpleNamespace())
    call = load_copy_call(find=lambda name, version: 0, load_library=lambda: library)
    assert isinstance(call, SingleCopies)
    assert library.cuMemcpyAsync.argtypes[2] is ctypes.c_size_t
    assert "one by one" in caplog.text


def test_single_copies_can_be_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    library = SimpleNamespace(cuMemcpyAsync=SimpleNamespace())
    assert isinstance(load_single_copies(lambda: library), SingleCopies)
    assert library.cuMemcpyAsync.restype is ctypes.c_uint
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("answer", "address"), [((0, 4096, 0), 4096), ((500, 4096, 0), 0), ((0, 0, 1), 0)]
)
def test_the_function_is_found_by_the_bindings(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[int, int, int], address: int
) -> None:
    asked: list[tuple[object, ...]] = []

    def get(*arguments: object) -> tuple[int, int, int]:
        asked.append(arguments)
        return answer

    bindings = SimpleNamespace(cuGetProcAddress=get)
    monkeypatch.setattr(cuda_driver.importlib, "import_module", lambda name: bindings)
    assert find_function(lambda: None)(b"cuX", 12080) == address
    assert asked == [(b"cuX", 12080, 0)]


@pytest.mark.parametrize(("code", "address"), [(0, 4096), (500, 0)])
def test_the_function_is_found_in_the_library_without_the_bindings(
    monkeypatch: pytest.MonkeyPatch, code: int, address: int
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    def get(name: Any, found: Any, version: Any, flags: Any, status: Any) -> int:
        assert (name.value, version.value, flags.value) == (b"cuX", 12080, 0)
        found._obj.value = 4096
        return code

    monkeypatch.setattr(cuda_driver.importlib, "import_module", missing)
    library = SimpleNamespace(cuGetProcAddress_v2=get)
    assert find_function(lambda: library)(b"cuX", 12080) == address
