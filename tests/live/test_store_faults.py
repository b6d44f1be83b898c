"""A store that does everything wrong costs time, and never a request or a token.

One server, through a proxy that does harm, in front of a Redis of the machine's. Each
test leaves the store as it should be, and the server finds that out by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sam_connector.core.types import BlockHash, GroupId, SessionKey
from sam_connector.pooling.manifest import Manifest, ManifestContext, encode
from tests.backends.fault_proxy import Fault, FaultProxy, error
from tests.backends.servers import Server, redis_server
from tests.live.host_tier import edit, wait_for
from tests.live.server import LiveServer
from tests.live.store import (
    Session,
    bring_back,
    forget,
    is_in_service,
    log_of,
    offloaded,
    states,
    with_store,
)

pytestmark = [pytest.mark.redis, pytest.mark.timeout(300)]

#: Far more than any deadline of ours, and less than a client would wait.
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory: Path = tmp_path_factory.mktemp("redis")
    with redis_server(directory) as server:
        yield server


@pytest.fixture(scope="module")
def proxy(redis: Server) -> Iterator[FaultProxy]:
    with FaultProxy(("127.0.0.1", redis.port)) as made:
        yield made


@pytest.fixture(scope="module")
def faulty_server(proxy: FaultProxy) -> Iterator[LiveServer]:
    """Started while nothing listened where its store should be."""
    proxy.refuse()
    with with_store(proxy.url) as server:
        proxy.accept()
        yield server


@pytest.fixture(autouse=True)
def _mended(proxy: FaultProxy, redis: Server) -> Iterator[None]:
    yield
    proxy.clear()
    proxy.accept()
    if redis.process is None:
        redis.start()


def test_d01_d03_a_store_that_comes_up_later_is_used_from_then_on(
    faulty_server: LiveServer,
) -> None:
    session = offloaded(faulty_server, "late")
    assert edit(faulty_server, "late", "prefetch")["status"] == "completed"
    assert session.again(faulty_server) == session.num_block_tokens


FAULTS = {
    "refuses": [],
    "is silent": [Fault(is_silent=True)],
    "drips": [Fault(drips=True)],
    "is slow": [Fault(delay_s=2.0)],
    "cuts values": [Fault(commands=("GET",), cut_after=1_000)],
    "cuts at once": [Fault(cut_after=0)],
    "flips a byte of values": [Fault(commands=("GET",), flip_at=-100)],
    "flips a byte of headers": [Fault(commands=("GET",), flip_at=30)],
    "is loading": [Fault(reply=error("LOADING Redis is loading"))],
    "wants a password": [Fault(reply=error("NOAUTH Authentication required."))],
    "has moved": [Fault(reply=error("MOVED 1234 127.0.0.1:1"))],
    "asks elsewhere": [Fault(reply=error("ASK 1234 127.0.0.1:1"))],
    "is a cluster that is down": [
        Fault(reply=error("CLUSTERDOWN The cluster is down"))
    ],
    "has shorter values": [Fault(commands=("GET",), reply=b"$3\r\nabc\r\n")],
    "talks nonsense": [Fault(reply=b"?what\r\n")],
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_request_is_answered_rightly_though_the_store(
    faulty_server: LiveServer, proxy: FaultProxy, name: str
) -> None:
    session = offloaded(faulty_server, f"though-{name.replace(' ', '-')}")
    if FAULTS[name]:
        proxy.add(*FAULTS[name])
    else:
        proxy.refuse()
    begin = time.monotonic()
    for _ in range(2):  # with the store asked, and after it has failed
        forget(faulty_server)
        session.again(faulty_server, by_name=False)
    edit(faulty_server, session.name, "prefetch", wait_s=10)
    session.again(faulty_server)
    assert edit(faulty_server, session.name, "offload", wait_s=10) is not None
    assert time.monotonic() - begin < 3 * PATIENCE_S
    assert faulty_server.get("/health").status_code == 200
    proxy.clear()
    proxy.accept()
    if "flips" in name or "shorter" in name:
        # A damaged value was deleted, as it should be; it is written anew.
        forget(faulty_server)
        session.again(faulty_server)
        wait_for(
            lambda: (
                edit(faulty_server, session.name, "offload")["status"] == "completed"
            ),
            "the session to be stored again",
        )
    bring_back(faulty_server, session)


def test_d07_while_the_store_is_out_nobody_waits_for_it(
    faulty_server: LiveServer, proxy: FaultProxy
) -> None:
    session = offloaded(faulty_server, "impatient")
    proxy.add(Fault(is_silent=True))
    wait_for(lambda: not is_in_service(faulty_server), "the breaker to open")
    num_commands = len(proxy.commands)
    for _ in range(30):
        forget(faulty_server)
        session.again(faulty_server, by_name=False)
    # Each would have asked, were the breaker closed; it tries again now and then.
    assert len(proxy.commands) - num_commands < 15
    proxy.clear()
    bring_back(faulty_server, session)


def test_a_change_of_state_is_one_line_for_each_side(
    faulty_server: LiveServer, proxy: FaultProxy
) -> None:
    session = offloaded(faulty_server, "logged")
    with log_of(faulty_server) as lines:
        proxy.refuse()
        wait_for(lambda: not is_in_service(faulty_server), "the breaker to open")
        for _ in range(5):
            edit(faulty_server, "nobody", "prefetch")
        proxy.accept()
        bring_back(faulty_server, session)
    ours = [line for line in lines if "(scheduler)" in line]
    assert states(ours) == ["out", "in"]
    assert faulty_server.metrics()["vllm:sam_store_breaker_opened_total"] >= 1


def test_d21_others_do_not_notice_a_slow_store(
    faulty_server: LiveServer, proxy: FaultProxy
) -> None:
    session = offloaded(faulty_server, "slow")
    proxy.add(Fault(delay_s=0.9))
    other = Session("unrelated")
    answers: list[dict[str, object]] = []
    stream = threading.Thread(
        target=lambda: answers.append(
            faulty_server.complete(other.prompt, max_tokens=60)
        )
    )
    stream.start()
    for _ in range(3):
        forget_begin = time.monotonic()
        assert faulty_server.get("/health").status_code == 200
        session.again(faulty_server, by_name=False)
        assert time.monotonic() - forget_begin < PATIENCE_S
    stream.join(PATIENCE_S)
    assert len(answers) == 1
    proxy.clear()
    bring_back(faulty_server, session)


def test_d06_a_store_that_was_restarted_empty_is_not_trusted(
    faulty_server: LiveServer, redis: Server
) -> None:
    session = offloaded(faulty_server, "emptied")
    redis.restart()
    wait_for(lambda: is_in_service(faulty_server), "the store to be in service")
    forget(faulty_server)
    assert edit(faulty_server, "emptied", "prefetch")["status"] == "not_found"
    assert session.again(faulty_server) == 0
    wait_for(
        lambda: edit(faulty_server, "emptied", "offload")["status"] == "completed",
        "the session to be stored again",
    )
    bring_back(faulty_server, session)


def test_d15_a_full_store_takes_nothing_and_loses_nothing(
    faulty_server: LiveServer, redis: Server
) -> None:
    held = offloaded(faulty_server, "held-by-a-full-store")
    redis.do("CONFIG", "SET", "maxmemory-policy", "noeviction")
    redis.do("CONFIG", "SET", "maxmemory", "1mb")
    try:
        session = Session("too-much")
        session.serve(faulty_server)
        result = edit(faulty_server, "too-much", "offload")
        assert result["status"] in ("rejected", "partial")
        assert "OOM" in result["reason"]
        assert result["blocks"]["reclaimed"] == 0
        assert session.again(faulty_server) == session.num_block_tokens
        # What it has can be read.
        forget(faulty_server)
        assert edit(faulty_server, held.name, "prefetch")["status"] == "completed"
        assert held.again(faulty_server) == held.num_block_tokens
    finally:
        redis.do("CONFIG", "SET", "maxmemory", "0")
    assert session.again(faulty_server) >= 0
    wait_for(
        lambda: edit(faulty_server, "too-much", "offload")["status"] == "completed",
        "the store to take it after all",
    )


def test_a_store_that_evicts_under_us_costs_a_recompute(
    faulty_server: LiveServer, redis: Server
) -> None:
    session = offloaded(faulty_server, "evicted")
    for key in redis.do("KEYS", "sam1:*")[::2]:
        redis.do("DEL", key)
    forget(faulty_server)
    assert edit(faulty_server, "evicted", "prefetch")["status"] in (
        "partial",
        "rejected",
    )
    session.again(faulty_server)


def test_a_replica_that_is_read_only_can_be_read(
    faulty_server: LiveServer, proxy: FaultProxy
) -> None:
    session = offloaded(faulty_server, "replica")
    read_only = error("READONLY You can't write against a read only replica.")
    writes = ("SET", "PEXPIRE", "EVAL", "EVALSHA", "MULTI", "EXEC", "UNLINK")
    proxy.add(Fault(commands=writes, reply=read_only))
    session.again(faulty_server)
    result = edit(faulty_server, "replica", "offload")
    assert result["status"] in ("completed", "rejected", "partial")
    other = Session("not-written")
    other.serve(faulty_server)
    refused = edit(faulty_server, "not-written", "offload")
    assert refused["status"] in ("rejected", "partial")
    assert other.again(faulty_server) == other.num_block_tokens
    proxy.clear()
    bring_back(faulty_server, session)


def manifest_names(redis: Server) -> list[bytes]:
    return [bytes(key) for key in redis.do("KEYS", "sam1m:*")]


@pytest.mark.parametrize("lie", ["other hashes", "another session", "garbage"])
def test_a_manifest_that_lies_changes_nothing(
    faulty_server: LiveServer, redis: Server, lie: str
) -> None:
    redis.do("FLUSHALL")
    session = offloaded(faulty_server, f"lied-{lie.replace(' ', '-')}")
    [name] = manifest_names(redis)
    version = f"{int(time.time() * 1000) + 10_000:020d}".encode()
    foreign = [BlockHash(bytes([i]) * 32) for i in range(20)]
    owner = "somebody-else" if lie == "another session" else session.name
    manifest = Manifest(
        session=SessionKey("", owner),
        contexts=[ManifestContext({GroupId(0): foreign})],
        block_sizes={GroupId(0): 32},
        version=int(version),
    )
    data = b"\xc1 nonsense" if lie == "garbage" else encode(manifest)
    redis.do("SET", name, version + data)
    forget(faulty_server)
    assert edit(faulty_server, session.name, "prefetch")["status"] == "rejected"
    assert session.again(faulty_server, by_name=False) > 0
