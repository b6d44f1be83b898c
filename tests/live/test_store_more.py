"""What a real Redis does by itself, and a store that is silent when we start.

One server, through a proxy, in front of a Redis of the machine's: passwords, replicas
and evictions here are Redis's own, where ``test_store_faults`` has replies made up.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sam_connector.core.types import SessionKey
from sam_connector.pooling.manifest import Manifest, ManifestLimits, decode, encode
from tests.backends.fault_proxy import Fault, FaultProxy
from tests.backends.servers import Server, redis_server
from tests.live.host_tier import counted, edit, new_prompt, wait_for
from tests.live.server import MODEL_NAME, LiveServer
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

_VERSION_DIGITS = 20
_PATIENCE_S = 60.0


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
def patient_server(proxy: FaultProxy) -> Iterator[LiveServer]:
    """Started while its store accepted connections and said nothing."""
    commands = ("HELLO", "AUTH", "CLIENT", "SELECT", "PING")
    proxy.add(Fault(is_silent=True), Fault(commands=commands, is_silent=True))
    with with_store(proxy.url) as server:
        yield server


@pytest.fixture(autouse=True)
def _mended(proxy: FaultProxy) -> Iterator[None]:
    yield
    proxy.clear()


def test_d01_a_store_that_is_silent_when_we_start_is_used_once_it_speaks(
    patient_server: LiveServer, proxy: FaultProxy
) -> None:
    session = Session("from-the-start")
    session.serve(patient_server)
    refused = edit(patient_server, "from-the-start", "offload")
    assert refused["status"] in ("rejected", "partial", "failed"), refused
    assert patient_server.get("/health").status_code == 200
    wait_for(lambda: not is_in_service(patient_server), "the breaker to open")
    assert patient_server.metrics()["vllm:sam_store_up"] == 0.0
    told = [
        line
        for line in patient_server.log_text().splitlines()
        if "out of service" in line and "(scheduler)" in line
    ]
    assert len(told) == 1, told
    proxy.clear()
    wait_for(lambda: is_in_service(patient_server), "the store to be in service")
    wait_for(
        lambda: (
            edit(patient_server, "from-the-start", "offload")["status"] == "completed"
        ),
        "the session to be stored after all",
    )
    bring_back(patient_server, session)
    wait_for(
        lambda: patient_server.metrics()["vllm:sam_store_up"] == 1.0,
        "the metric to say so",
    )


class Stream:
    """An answer that comes bit by bit; counts what has come."""

    def __init__(self, server: LiveServer, num_tokens: int) -> None:
        self.num_chunks = 0
        self._server = server
        self._body = {
            "model": MODEL_NAME,
            "prompt": new_prompt(),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Stream:
        self._thread.start()
        wait_for(lambda: self.num_chunks > 0, "the first token of a stream")
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(_PATIENCE_S)
        assert not self._thread.is_alive()

    def _read(self) -> None:
        client = self._server.client
        with client.stream("POST", "/v1/completions", json=self._body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.num_chunks += len(json.loads(line[6:])["choices"])


def test_d21_a_stream_goes_on_while_another_request_waits_for_the_store(
    patient_server: LiveServer, proxy: FaultProxy
) -> None:
    session = offloaded(patient_server, "waits")
    proxy.add(Fault(is_silent=True))
    with Stream(patient_server, 1_500) as stream:
        before = stream.num_chunks
        # It waits for the look-up's deadline, two seconds, and then computes.
        session.again(patient_server, by_name=False)
        # A step loop that waited as well had made as many as the answer has.
        assert stream.num_chunks - before > 40
        assert patient_server.get("/health").status_code == 200
    assert stream.num_chunks == 1_500
    proxy.clear()
    bring_back(patient_server, session)


def test_a_password_that_was_changed_puts_the_store_out_of_service(
    patient_server: LiveServer, proxy: FaultProxy, redis: Server
) -> None:
    session = offloaded(patient_server, "locked-out")
    # Known users stay, as they do in Redis, so this one is there already.
    with redis.admin() as admin, log_of(patient_server) as lines:
        admin.config_set("requirepass", "a-secret-of-theirs")
        proxy.cut()
        try:
            wait_for(lambda: not is_in_service(patient_server), "the breaker to open")
            forget(patient_server)
            session.again(patient_server, by_name=False)
        finally:
            admin.config_set("requirepass", "")
        bring_back(patient_server, session)
    assert states([x for x in lines if "(scheduler)" in x]) == ["out", "in"]
    assert "a-secret-of-theirs" not in patient_server.log_text()


def test_a_primary_that_became_a_replica_is_read_and_not_written(
    patient_server: LiveServer, redis: Server
) -> None:
    session = offloaded(patient_server, "demoted")
    redis.do("REPLICAOF", "127.0.0.1", "1")  # it keeps what it has
    try:
        with counted(patient_server, "store_read_values") as risen:
            assert session.again(patient_server, by_name=False) > 0
        assert risen["store_read_values"] > 0
        other = Session("never-written")
        other.serve(patient_server)
        refused = edit(patient_server, "never-written", "offload")
        assert refused["status"] in ("rejected", "partial", "failed"), refused
        assert other.again(patient_server) == other.num_block_tokens
    finally:
        redis.do("REPLICAOF", "NO", "ONE")
    wait_for(
        lambda: (
            edit(patient_server, "never-written", "offload")["status"] == "completed"
        ),
        "the store to take it after all",
    )
    bring_back(patient_server, session)


def test_redis_evicts_under_us(patient_server: LiveServer, redis: Server) -> None:
    redis.do("FLUSHALL")
    session = offloaded(patient_server, "pushed-out")
    with redis.admin() as admin:
        used = admin.info("memory")["used_memory"]
        admin.config_set("maxmemory-policy", "allkeys-lru")
        admin.config_set("maxmemory", used + (1 << 20))
        try:
            for n in range(3):
                offloaded(patient_server, f"pushes-{n}")
            assert admin.info("stats")["evicted_keys"] > 0
            forget(patient_server)
            edit(patient_server, "pushed-out", "prefetch")
            session.again(patient_server)
        finally:
            admin.config_set("maxmemory", 0)
            admin.config_set("maxmemory-policy", "noeviction")
    wait_for(
        lambda: edit(patient_server, "pushed-out", "offload")["status"] == "completed",
        "the session to be stored again",
    )
    bring_back(patient_server, session)


def test_a_manifest_that_names_anothers_blocks_brings_nobody_their_tokens(
    patient_server: LiveServer, redis: Server
) -> None:
    """Its hashes are true, and of a conversation that is not this session's."""
    redis.do("FLUSHALL")
    other = offloaded(patient_server, "other-conversation")
    [of_other] = redis.do("KEYS", "sam1m:*")
    session = offloaded(patient_server, "betrayed")
    [name] = [key for key in redis.do("KEYS", "sam1m:*") if key != of_other]
    data = redis.do("GET", of_other)[_VERSION_DIGITS:]
    true = decode(data, SessionKey("", other.name), ManifestLimits())
    version = int(redis.do("GET", name)[:_VERSION_DIGITS]) + 1_000
    lie = Manifest(
        session=SessionKey("", session.name),
        contexts=true.contexts,
        block_sizes=true.block_sizes,
        version=version,
    )
    redis.do("SET", name, b"%020d" % version + encode(lie))
    forget(patient_server)
    with counted(patient_server, "store_read_values") as risen:
        assert edit(patient_server, session.name, "prefetch")["status"] == "completed"
    assert risen["store_read_values"] > 0  # the other's, as it was told
    session.again(patient_server)
    assert other.again(patient_server) > 0
