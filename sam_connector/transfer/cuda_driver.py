"""The CUDA driver's copy calls: a whole list at once, or one by one.

``cuMemcpyBatchAsync`` came with CUDA 12.8. It is asked for in the form it had then, so
that newer drivers, whose own form has one argument less, hand out the same function.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from sam_connector.transfer.layout import IntArray

logger = logging.getLogger(__name__)

BATCH_SYMBOL = b"cuMemcpyBatchAsync"
BATCH_SINCE = 12080

#: ``CUmemcpySrcAccessOrder``: in stream order, or whenever the driver likes.
ACCESS_STREAM = 1
ACCESS_ANY = 3

#: Finds a driver function's address by name and version; 0 when there is none.
FindFunction: TypeAlias = Callable[[bytes, int], int]


class CopyCall(Protocol):
    """Queues copies on a stream and returns; the arrays may be dropped then."""

    def __call__(
        self,
        targets: IntArray,
        sources: IntArray,
        sizes: IntArray,
        *,
        access_order: int,
        stream: int,
    ) -> None:
        """Raises ``RuntimeError`` when the driver refuses; part may be queued."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("access_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


_BATCH_TYPE = ctypes.CFUNCTYPE(
    ctypes.c_uint,
    ctypes.c_void_p,  # targets
    ctypes.c_void_p,  # sources
    ctypes.c_void_p,  # sizes
    ctypes.c_size_t,  # how many
    ctypes.POINTER(_Attributes),
    ctypes.POINTER(ctypes.c_size_t),  # first copy that each of these is for
    ctypes.c_size_t,  # how many of them
    ctypes.POINTER(ctypes.c_size_t),  # out: the copy that is wrong
    ctypes.c_void_p,  # stream
)


class BatchCopy:
    """One driver call for a list.

    Args:
        address: of ``cuMemcpyBatchAsync`` as it was in CUDA 12.8.
    """

    def __init__(self, address: int) -> None:
        self._call = _BATCH_TYPE(address)

    def __call__(
        self,
        targets: IntArray,
        sources: IntArray,
        sizes: IntArray,
        *,
        access_order: int,
        stream: int,
    ) -> None:
        attributes = _Attributes(access_order=access_order)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = self._call(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
            ctypes.byref(failed),
            stream,
        )
        if code != 0:
            raise RuntimeError(
                f"{BATCH_SYMBOL.decode()}: CUDA error {code}, "
                f"copy {failed.value} of {len(sizes)}"
            )


class SingleCopies:
    """One driver call per copy, for drivers without the other.

    Args:
        call: ``cuMemcpyAsync``: target, source, bytes, stream.
    """

    def __init__(self, call: Callable[[int, int, int, int], int]) -> None:
        self._call = call

    def __call__(
        self,
        targets: IntArray,
        sources: IntArray,
        sizes: IntArray,
        *,
        access_order: int,
        stream: int,
    ) -> None:
        copies = zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)
        for index, (target, source, size) in enumerate(copies):
            if code := self._call(target, source, size, stream):
                raise RuntimeError(
                    f"cuMemcpyAsync: CUDA error {code}, copy {index} of {len(sizes)}"
                )


def load_copy_call(
    *,
    find: FindFunction | None = None,
    load_library: Callable[[], Any] | None = None,
) -> CopyCall:
    """The best way to copy that this machine's driver has.

    Args:
        find: instead of asking ``cuda.bindings`` or the driver's library.
        load_library: instead of loading the driver's library.

    Raises:
        OSError: there is no CUDA driver.
    """
    load_library = load_library or _driver_library
    find = find or find_function(load_library)
    if address := find(BATCH_SYMBOL, BATCH_SINCE):
        return BatchCopy(address)
    logger.warning(
        "this CUDA driver has no %s (CUDA 12.8): blocks are copied one by one, "
        "which is slower for small ones",
        BATCH_SYMBOL.decode(),
    )
    return load_single_copies(load_library)


def load_single_copies(
    load_library: Callable[[], Any] | None = None,
) -> SingleCopies:
    """The way that every driver has.

    Args:
        load_library: instead of loading the driver's library.

    Raises:
        OSError: there is no CUDA driver.
    """
    call = (load_library or _driver_library)().cuMemcpyAsync
    call.restype = ctypes.c_uint
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return SingleCopies(call)


def find_function(load_library: Callable[[], Any]) -> FindFunction:
    """How to ask the driver for a function: by ``cuda.bindings`` if it is there."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return lambda name, version: _find_in_library(load_library(), name, version)
    return lambda name, version: _find_by_bindings(driver, name, version)


def _find_by_bindings(driver: Any, name: bytes, version: int) -> int:
    code, address, _ = driver.cuGetProcAddress(name, version, 0)
    return int(address) if int(code) == 0 and address else 0


def _find_in_library(library: Any, name: bytes, version: int) -> int:
    address, status = ctypes.c_void_p(), ctypes.c_int()
    code = library.cuGetProcAddress_v2(
        ctypes.c_char_p(name),
        ctypes.byref(address),
        ctypes.c_int(version),
        ctypes.c_uint64(0),
        ctypes.byref(status),
    )
    return (address.value or 0) if code == 0 else 0


def _driver_library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
