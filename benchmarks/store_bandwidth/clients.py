"""The clients that are compared; each moves a whole workload and says how long."""

from __future__ import annotations

import importlib.metadata
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from benchmarks.store_bandwidth.workload import Workload, WrongBytesError
from sam_connector.storage.port import Entry, Outcome
from sam_connector.storage.registry import StoreOptions, open_store

_TIMEOUT_S = 60.0

#: Below it, values are asked for many at a time: one at a time is all latency.
_PIPELINED_BELOW = 256 << 10
_DEPTH = 16

#: The limit writes ahead of the replies, which are small; it reads large values one at
#: a time, which is fastest.
_AHEAD_BYTES = 8 << 20


class Client(ABC):
    """One client with so many connections to a server on this machine."""

    name: str

    @abstractmethod
    def set(self, workload: Workload) -> float:
        """Writes all values, none of which is there; seconds."""

    @abstractmethod
    def get(self, workload: Workload) -> float:
        """Reads all values into the workload's buffers; seconds."""

    def close(self) -> None:  # noqa: B027
        """Ends connections, if it has any between two calls."""


class Limit(Client):
    """A C program that does nothing else; compiled here. It checks what it reads."""

    name = "limit"
    _binary: Path | None = None

    def __init__(self, port: int, num_connections: int) -> None:
        self._port = port
        self._num_connections = num_connections
        self._process: subprocess.Popen[str] | None = None

    @classmethod
    def compile(cls, folder: Path) -> None:
        cls._binary = folder / "limit"
        source = Path(__file__).with_name("limit.c")
        command = ["cc", "-O2", "-pthread", "-o", str(cls._binary), str(source)]
        subprocess.run(command, check=True)

    @override
    def set(self, workload: Workload) -> float:
        return self._run("set", workload)

    @override
    def get(self, workload: Workload) -> float:
        return self._run("get", workload)

    @override
    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()

    def _run(self, operation: str, workload: Workload) -> float:
        if self._process is None:
            self._process = self._started(workload)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{operation}\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            _, errors = process.communicate()
            raise WrongBytesError(f"limit: {errors.strip()}")
        return float(answer)

    def _started(self, workload: Workload) -> subprocess.Popen[str]:
        get_depth = _DEPTH if workload.size < _PIPELINED_BELOW else 1
        set_depth = _AHEAD_BYTES // workload.size
        command = [
            str(self._binary),
            *("127.0.0.1", str(self._port), str(workload.size)),
            *(str(self._num_connections), str(set_depth), str(get_depth)),
            *(str(workload.keys_path), str(workload.values_path)),
        ]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )


class Ours(Client):
    """``sam_backends.redis_store``, as the connector uses it."""

    name = "ours"

    def __init__(self, port: int, num_connections: int) -> None:
        options = StoreOptions(num_connections=num_connections)
        self._store = open_store(f"redis://127.0.0.1:{port}", options).blocks

    @override
    def set(self, workload: Workload) -> float:
        entries = _entries(workload, workload.values)
        start = time.monotonic()
        result = self._store.put(entries, ttl_s=3_600, deadline=start + _TIMEOUT_S)
        took = time.monotonic() - start
        _check(result.outcomes, result.error)
        return took

    @override
    def get(self, workload: Workload) -> float:
        entries = _entries(workload, workload.buffers)
        start = time.monotonic()
        result = self._store.get(entries, deadline=start + _TIMEOUT_S)
        took = time.monotonic() - start
        _check(result.outcomes, result.error)
        return took

    @override
    def close(self) -> None:
        self._store.close()


class _PerThread(Client):
    """A library whose calls are made one by one, by a thread per connection."""

    def __init__(self, port: int, num_connections: int) -> None:
        self._clients = [self._connect(port) for _ in range(num_connections)]

    @abstractmethod
    def _connect(self, port: int) -> Any: ...

    @abstractmethod
    def _set(self, client: Any, keys: Sequence[str], values: Sequence[Any]) -> None: ...

    @abstractmethod
    def _get(
        self, client: Any, keys: Sequence[str], buffers: Sequence[Any]
    ) -> None: ...

    @override
    def set(self, workload: Workload) -> float:
        return self._run(self._set, workload, workload.values)

    @override
    def get(self, workload: Workload) -> float:
        return self._run(self._get, workload, workload.buffers)

    def _run(
        self,
        move: Callable[[Any, Sequence[str], Sequence[Any]], None],
        workload: Workload,
        memory: Sequence[memoryview],
    ) -> float:
        keys, count = [str(key) for key in workload.keys], len(self._clients)
        threads = [
            threading.Thread(target=move, args=(c, keys[i::count], memory[i::count]))
            for i, c in enumerate(self._clients)
        ]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - start


class RedisPy(_PerThread):
    """redis-py, its replies parsed in Python."""

    name = "redis-py"
    parser = "_RESP2Parser"

    @override
    def _connect(self, port: int) -> Any:
        import redis._parsers

        parser = getattr(redis._parsers, self.parser)
        pool = redis.ConnectionPool(
            host="127.0.0.1", port=port, protocol=2, parser_class=parser
        )
        return redis.Redis(connection_pool=pool)

    @override
    def _set(self, client: Any, keys: Sequence[str], values: Sequence[Any]) -> None:
        for batch in _batches(keys, values):
            pipeline = client.pipeline(transaction=False)
            for key, value in batch:
                pipeline.set(key, value, px=3_600_000)
            pipeline.execute()

    @override
    def _get(self, client: Any, keys: Sequence[str], buffers: Sequence[Any]) -> None:
        for batch in _batches(keys, buffers):
            pipeline = client.pipeline(transaction=False)
            for key, _ in batch:
                pipeline.get(key)
            for (_, buffer), value in zip(batch, pipeline.execute(), strict=True):
                buffer[:] = value

    @override
    def close(self) -> None:
        for client in self._clients:
            client.connection_pool.disconnect()


class RedisPyHiredis(RedisPy):
    """redis-py with hiredis."""

    name = "redis-py+hiredis"
    parser = "_HiredisParser"


class Glide(_PerThread):
    """valkey-glide-sync, which reads into a buffer it is given."""

    name = "valkey-glide-sync"

    @override
    def _connect(self, port: int) -> Any:
        from glide_sync import GlideClient, GlideClientConfiguration, NodeAddress

        return GlideClient.create(
            GlideClientConfiguration(
                [NodeAddress("127.0.0.1", port)], request_timeout=10_000
            )
        )

    @override
    def _set(self, client: Any, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            client.set(key, value)

    @override
    def _get(self, client: Any, keys: Sequence[str], buffers: Sequence[Any]) -> None:
        for key, buffer in zip(keys, buffers, strict=True):
            client.get(key, buffer=buffer)

    @override
    def close(self) -> None:
        for client in self._clients:
            client.close()


LIBRARIES: dict[type[Client], str] = {
    RedisPy: "redis",
    RedisPyHiredis: "hiredis",
    Glide: "valkey-glide-sync",
}


def installed() -> tuple[list[type[Client]], dict[str, str]]:
    """Libraries that are here, and the version of each, or that it is absent.

    LMCache's native client counts among them only where lmcache is installed; its
    wheels need CUDA and are not part of this project's environment.
    """
    found: list[type[Client]] = []
    versions: dict[str, str] = {}
    for kind, distribution in LIBRARIES.items():
        try:
            versions[distribution] = importlib.metadata.version(distribution)
            found.append(kind)
        except importlib.metadata.PackageNotFoundError:
            versions[distribution] = "absent"
    try:
        versions["lmcache"] = importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        versions["lmcache"] = "absent"
    return found, versions


def compiled() -> tempfile.TemporaryDirectory[str]:
    """Compiles the limit; it is gone with the folder that is returned."""
    folder = tempfile.TemporaryDirectory(prefix="store-bandwidth-")
    Limit.compile(Path(folder.name))
    return folder


def _entries(workload: Workload, memory: Sequence[memoryview]) -> list[Entry]:
    return [
        Entry(key, [buffer]) for key, buffer in zip(workload.keys, memory, strict=True)
    ]


def _check(outcomes: Sequence[Outcome], error: Exception | None) -> None:
    if any(outcome is not Outcome.DONE for outcome in outcomes):
        raise RuntimeError(f"ours: {error}")


def _batches(
    keys: Sequence[str], memory: Sequence[memoryview]
) -> list[list[tuple[str, memoryview]]]:
    size = _DEPTH if len(memory[0]) < _PIPELINED_BELOW else 1
    pairs = list(zip(keys, memory, strict=True))
    return [pairs[start : start + size] for start in range(0, len(pairs), size)]
