"""Faults of others with remote stores (group D): none of them happens to ours.

D22 (a client bound to an event loop that has ended) cannot happen: no loop is used, and
``test_d22_...`` says so. What belongs to the layers above is tested there.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import redis

from sam_backends.embedded import EmbeddedServer
from sam_backends.redis_store import open_store
from sam_connector.errors import (
    ConfigurationError,
    StoreDenied,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from sam_connector.storage.key import StoreKey
from sam_connector.storage.port import (
    ManifestRecord,
    ManifestStore,
    Outcome,
    StoreBackend,
    WriteOutcome,
)
from tests.backends.builders import (
    OPTIONS,
    is_right,
    make_key,
    make_keys,
    make_manifest_key,
    soon,
    source,
    sources,
    target,
    targets,
)
from tests.backends.fault_proxy import Fault, FaultProxy, error
from tests.backends.servers import Server, cluster

DONE, MISSING, FULL, FAILED = (
    Outcome.DONE,
    Outcome.MISSING,
    Outcome.FULL,
    Outcome.FAILED,
)
#: A short deadline, and what a call with it may take on a busy machine.
_SHORT_S = 0.1
_BOUND_S = 3.0

_NUM_BYTES = 1_000
#: ``$1000`` and its end.
_HEAD_BYTES = 7


@pytest.fixture
def filled(store: StoreBackend) -> StoreBackend:
    """Behind the proxy, with four values."""
    result = store.put(sources(make_keys(4), _NUM_BYTES), ttl_s=100, deadline=soon())
    assert result.outcomes == [DONE] * 4
    return store


# --- D04: a short read is a broken connection --------------------------------------


@pytest.mark.parametrize(
    "num_bytes",
    [0, 1, _HEAD_BYTES - 1, _HEAD_BYTES, _HEAD_BYTES + _NUM_BYTES // 2, 1_008],
)
def test_d04_a_reply_cut_short_costs_one_connection(
    filled: StoreBackend, proxy: FaultProxy, num_bytes: int
) -> None:
    """Cut once, the value comes over the next connection."""
    key = make_key(1)
    proxy.add(Fault(commands=("GET",), cut_after=num_bytes, times=1))
    entry = target(key, _NUM_BYTES)
    assert filled.get([entry], deadline=soon()).outcomes == [DONE]
    assert is_right(entry)
    assert proxy.num_connections == 2


@pytest.mark.parametrize("num_bytes", [0, 5, _HEAD_BYTES, 500])
def test_d04_replies_always_cut_short_are_failures(
    filled: StoreBackend, proxy: FaultProxy, num_bytes: int
) -> None:
    """Not an exception, not a value in part; what came before the cut counts."""
    proxy.add(Fault(commands=("GET",), key=_name(2), cut_after=num_bytes))
    entries = targets(make_keys(4), _NUM_BYTES)
    result = filled.get(entries, deadline=soon())
    assert result.outcomes == [DONE, DONE, FAILED, FAILED]
    assert isinstance(result.error, StoreUnavailable)
    assert all(map(is_right, entries[:2]))
    proxy.clear()
    assert filled.get(entries, deadline=soon()).outcomes == [DONE] * 4
    assert all(map(is_right, entries))


def test_d04_a_restarted_server_is_found_again(own_redis: Server) -> None:
    """Idle connections are stale then; calls notice that themselves."""
    for url in (own_redis.url, f"unix://{own_redis.socket_path}"):
        with closing(open_store(url, OPTIONS).blocks) as store:
            keys = make_keys(3)
            store.put(sources(keys), ttl_s=100, deadline=soon())
            own_redis.restart()
            result = store.get(targets(keys), deadline=soon())
            assert result.outcomes == [MISSING] * 3
            own_redis.kill()
            result = store.get(targets(keys), deadline=soon())
            assert result.outcomes == [FAILED] * 3
            assert isinstance(result.error, StoreUnavailable)
            own_redis.start()
            result = store.put(sources(keys), ttl_s=100, deadline=soon())
            assert result.outcomes == [DONE] * 3


# --- D09: a server that accepts and never answers -----------------------------------


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel"])
@pytest.mark.parametrize("fault", ["silent", "drips"])
def test_d09_calls_end_by_their_deadline(
    fake: FaultProxy, scheme: str, fault: str
) -> None:
    """Also while a connection is being made, and if bytes come one at a time."""
    everything = ("AUTH", "CLIENT", "CLUSTER", "GET", "EVAL", "EVALSHA", "SELECT")
    everything += ("SENTINEL", "PING", "MULTI", "EXISTS", "GETRANGE", "UNLINK")
    if fault == "silent":
        fake.add(Fault(commands=everything, is_silent=True))
    else:
        fake.add(Fault(commands=everything, reply=b"+" + b"x" * 999, drips=True))
    url = f"{scheme}://u:secret@127.0.0.1:{fake.port}/" + "sam" * ("sent" in scheme)
    opened = open_store(url, OPTIONS)
    assert opened.manifests is not None
    with closing(opened.blocks), closing(opened.manifests):
        for call in _calls(opened.blocks, opened.manifests):
            start = time.monotonic()
            assert call(start + _SHORT_S) in (FAILED, WriteOutcome.FAILED)
            assert time.monotonic() - start < _BOUND_S


def test_d09_a_server_that_hangs_costs_no_more_than_the_deadline(
    own_redis: Server,
) -> None:
    """A real one, stopped after connections were made, then woken."""
    opened = open_store(own_redis.url, OPTIONS)
    assert opened.manifests is not None
    with closing(opened.blocks) as store, closing(opened.manifests) as manifests:
        key = make_key(0)
        store.put([source(key)], ttl_s=100, deadline=soon())
        own_redis.pause()
        for call in _calls(store, manifests):
            start = time.monotonic()
            assert call(start + _SHORT_S) in (FAILED, WriteOutcome.FAILED)
            assert time.monotonic() - start < _BOUND_S
        result = store.get([target(key)], deadline=soon(_SHORT_S))
        assert isinstance(result.error, StoreTimeout)
        own_redis.resume()
        assert store.get([target(key)], deadline=soon()).outcomes == [DONE]


def test_d09_a_value_that_drips_ends_by_the_deadline(
    filled: StoreBackend, proxy: FaultProxy
) -> None:
    proxy.add(Fault(commands=("GET",), drips=True))
    start = time.monotonic()
    result = filled.get([target(make_key(0), _NUM_BYTES)], deadline=start + _SHORT_S)
    assert result.outcomes == [FAILED]
    assert isinstance(result.error, StoreTimeout)
    assert time.monotonic() - start < _BOUND_S


# --- D10: a reply never answers another request -------------------------------------


@pytest.mark.timeout(60)
def test_d10_no_reply_is_taken_for_another(
    embedded: EmbeddedServer, store: StoreBackend, proxy: FaultProxy
) -> None:
    """Calls give up at any moment, a thousand times; the next ask for other values."""
    keys = make_keys(8)
    with closing(open_store(embedded.url, OPTIONS).blocks) as direct:
        direct.put(sources(keys, 20_000), ttl_s=100, deadline=soon())
    dice = random.Random(5)
    given_up = dict.fromkeys(("late", "hasty", "calm"), 0)
    for _ in range(1_000):
        proxy.clear()
        kind = dice.choice(list(given_up))
        timeout_s = 15.0 if kind == "calm" else dice.random() * 0.004
        if kind == "late":
            proxy.add(Fault(commands=("GET",), delay_s=0.02, times=1))
        entries = targets(dice.sample(keys, 3), 20_000)
        result = store.get(entries, deadline=time.monotonic() + timeout_s)
        for entry, outcome in zip(entries, result.outcomes, strict=True):
            assert outcome in (DONE, FAILED)
            assert outcome is FAILED or is_right(entry)
        given_up[kind] += FAILED in result.outcomes
    assert given_up["late"] > 200
    assert given_up["calm"] == 0
    proxy.clear()
    entries = targets(keys, 20_000)
    assert store.get(entries, deadline=soon()).outcomes == [DONE] * 8
    assert all(map(is_right, entries))


def test_d10_a_late_answer_is_not_the_next_ones(
    filled: StoreBackend, proxy: FaultProxy
) -> None:
    """Two values of one length: only the bytes tell them apart."""
    proxy.add(Fault(commands=("GET",), delay_s=0.3, times=1))
    first, second = targets(make_keys(2), _NUM_BYTES)
    assert filled.get([first], deadline=soon(_SHORT_S)).outcomes == [FAILED]
    assert filled.get([second], deadline=soon()).outcomes == [DONE]
    assert is_right(second)


# --- D12: batches have bounds -------------------------------------------------------


def test_d12_batches_have_bounds(proxy: FaultProxy, store: StoreBackend) -> None:
    """3,000 names: never more than a thousand in one command or one go."""
    keys = make_keys(3_000, start=10_000)
    result = store.touch(keys, ttl_s=100, deadline=soon())
    assert result.outcomes == [MISSING] * 3_000
    sizes = [len(c) for c in proxy.commands if c[0] in (b"EVAL", b"EVALSHA")]
    assert sum(sizes) >= 3_000
    assert max(sizes) <= 1_004


def test_d12_a_batch_that_fails_fails_alone(
    proxy: FaultProxy, store: StoreBackend
) -> None:
    """The second thousand meets an error; order is kept."""
    keys = make_keys(3_000, start=20_000)
    store.put(sources(keys[::7]), ttl_s=100, deadline=soon())
    found = [DONE if n % 7 == 0 else MISSING for n in range(3_000)]
    assert store.exists(keys, deadline=soon()).outcomes == found
    assert store.touch(keys, ttl_s=100, deadline=soon()).outcomes == found
    bad = str(keys[1_500]).encode()
    proxy.add(Fault(commands=("EVALSHA",), key=bad, reply=error("ERR broken")))
    result = store.touch(keys, ttl_s=100, deadline=soon())
    expected = [*found[:1_000], *[FAILED] * 1_000, *found[2_000:]]
    assert result.outcomes == expected
    assert "broken" in str(result.error)


# --- D13: redirections and servers that are not ready -------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "MOVED 1234 127.0.0.1:1",
        "ASK 1234 127.0.0.1:1",
        "CLUSTERDOWN The cluster is down",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "LOADING Redis is loading the dataset in memory",
        "READONLY You can't write against a read only replica.",
        "MASTERDOWN Link with MASTER is down",
    ],
)
def test_d13_a_server_not_ready_is_a_failure_of_what_it_refused(
    filled: StoreBackend, manifests: ManifestStore, proxy: FaultProxy, text: str
) -> None:
    """Others in the batch are served, and the connection is of use afterwards."""
    commands = ("GET", "EVALSHA", "UNLINK", "SET")
    proxy.add(Fault(commands=commands, key=_name(1), reply=error(text)))
    entries = targets(make_keys(3), _NUM_BYTES)
    result = filled.get(entries, deadline=soon())
    assert result.outcomes == [DONE, FAILED, DONE]
    assert isinstance(result.error, StoreUnavailable)
    assert text.split()[0] in str(result.error)
    assert is_right(entries[2])
    keys = make_keys(3)
    # One command asks for all of them.
    assert filled.exists(keys, deadline=soon()).outcomes == [FAILED] * 3
    put = filled.put(sources(keys, _NUM_BYTES), ttl_s=100, deadline=soon())
    assert put.outcomes == [DONE, FAILED, DONE]
    assert filled.delete(keys, deadline=soon()).outcomes == [DONE, FAILED, DONE]
    assert proxy.num_connections == 1
    proxy.clear()
    proxy.add(Fault(commands=("EVAL", "EVALSHA", "GETRANGE"), reply=error(text)))
    for call in _calls(filled, manifests)[-3:]:
        assert call(soon()) in (FAILED, WriteOutcome.FAILED)
    result = filled.touch(keys, ttl_s=9, deadline=soon())
    assert isinstance(result.error, StoreUnavailable)


@pytest.mark.parametrize("text", ["NOPERM no permissions", "NOAUTH required"])
def test_d13_a_refusal_that_needs_an_operator_says_so(
    filled: StoreBackend, proxy: FaultProxy, text: str
) -> None:
    proxy.add(Fault(commands=("GET",), reply=error(text)))
    result = filled.get([target(make_key(1), _NUM_BYTES)], deadline=soon())
    assert result.outcomes == [FAILED]
    assert isinstance(result.error, StoreDenied)


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(60)
def test_d13_slots_may_move_between_nodes(tmp_path: Path) -> None:
    """The client follows, and a batch over all slots is no CROSSSLOT."""
    with (
        cluster(tmp_path) as servers,
        closing(open_store(servers.url, OPTIONS).blocks) as store,
    ):
        keys = make_keys(60)
        assert _all_done(store, keys)
        first = str(keys[0])
        slot = int(servers.nodes[0].do("CLUSTER", "KEYSLOT", first))
        source_node = slot * 3 // 16_384
        servers.move_slot(slot, source_node, (source_node + 1) % 3)
        assert _all_done(store, keys)
        assert servers.nodes[(source_node + 1) % 3].do("EXISTS", first) == 1


@pytest.mark.redis
def test_d13_a_cluster_behind_a_plain_url_says_what_is_wrong(
    own_redis: Server, tmp_path: Path
) -> None:
    with FaultProxy() as fake:
        fake.add(Fault(commands=("GET",), reply=error("MOVED 1 127.0.0.1:7")))
        with closing(open_store(fake.url, OPTIONS).blocks) as store:
            result = store.get([target(make_key(0))], deadline=soon())
    assert "redis+cluster://" in str(result.error)


# --- D15: a server without room -----------------------------------------------------


def test_d15_a_full_server_is_full_and_still_reads(
    filled: StoreBackend, manifests: ManifestStore, proxy: FaultProxy
) -> None:
    full = error("OOM command not allowed when used memory > 'maxmemory'.")
    proxy.add(Fault(commands=("SET", "EVAL"), reply=full))
    keys = make_keys(4)
    result = filled.put(sources(keys, _NUM_BYTES), ttl_s=100, deadline=soon())
    assert result.outcomes == [FULL] * 4
    assert isinstance(result.error, StoreFull)
    entries = targets(keys, _NUM_BYTES)
    assert filled.get(entries, deadline=soon()).outcomes == [DONE] * 4
    assert all(map(is_right, entries))
    record = ManifestRecord(1, b"x")
    written = manifests.write(make_manifest_key(), record, ttl_s=9, deadline=soon())
    assert written is WriteOutcome.FULL
    proxy.clear()
    result = filled.put(sources(keys, _NUM_BYTES), ttl_s=100, deadline=soon())
    assert result.outcomes == [DONE] * 4


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_d15_a_real_server_at_its_limit(tmp_path: Path, policy: str) -> None:
    """Without eviction it is full, and takes more when there is room again."""
    with (
        EmbeddedServer(maxmemory="8mb", maxmemory_policy=policy) as server,
        closing(open_store(server.url, OPTIONS).blocks) as store,
    ):
        keys = make_keys(40)
        outcomes = [
            store.put([source(k, 500_000)], ttl_s=100, deadline=soon()).outcomes[0]
            for k in keys
        ]
        there = store.exists(keys, deadline=soon()).outcomes
        assert DONE in there
        entries = targets(keys, 500_000)
        got = store.get(entries, deadline=soon()).outcomes
        assert all(is_right(e) for e, o in zip(entries, got, strict=True) if o is DONE)
        if policy == "noeviction":
            assert set(outcomes) == {DONE, FULL}
            assert there == [DONE if o is DONE else MISSING for o in outcomes]
            store.delete(keys, deadline=soon())
            again = store.put([source(keys[0])], ttl_s=100, deadline=soon())
            assert again.outcomes == [DONE]
        else:
            assert set(outcomes) == {DONE}
            assert MISSING in there


# --- D16: every key has an end ------------------------------------------------------


@pytest.mark.parametrize("ttl_s", [0.0004, 0.4, 1, 300.7, 3_600, 1e300])
def test_d16_no_key_without_an_end(
    own_redis: Server, ttl_s: float, tmp_path: Path
) -> None:
    """Written, written again, refreshed; fractions are rounded up."""
    opened = open_store(own_redis.url, OPTIONS)
    assert opened.manifests is not None
    with closing(opened.blocks) as store, closing(opened.manifests) as manifests:
        key, name = make_key(0), str(make_key(0))
        manifest_key = make_manifest_key()
        record = ManifestRecord(1, b"x")

        def check(name: str) -> None:
            left_ms = own_redis.do("PTTL", name)
            assert left_ms != -1
            assert left_ms <= ttl_s * 1_000 + 1
            assert ttl_s < 0.1 or left_ms > 0
            assert ttl_s < 1 or left_ms > min(ttl_s * 1_000 - 5_000, 1e12)

        for _ in range(2):
            put = store.put([source(key)], ttl_s=ttl_s, deadline=soon())
            assert put.outcomes == [DONE]
            check(name)
        store.touch([key], ttl_s=ttl_s, deadline=soon())
        check(name)
        manifests.write(manifest_key, record, ttl_s=ttl_s, deadline=soon())
        check(str(manifest_key))
        manifests.touch(manifest_key, ttl_s=ttl_s, deadline=soon())
        check(str(manifest_key))


@pytest.mark.parametrize("ttl_s", [0.0, -0.0, -1.0, float("nan")])
def test_d16_no_time_is_not_for_ever(store: StoreBackend, ttl_s: float) -> None:
    with pytest.raises(ValueError, match="ttl_s"):
        store.put([source(make_key(0))], ttl_s=ttl_s, deadline=soon())
    with pytest.raises(ValueError, match="ttl_s"):
        store.touch([make_key(0)], ttl_s=ttl_s, deadline=soon())


def test_d16_writing_again_keeps_the_later_end_and_mends_the_value(
    own_redis: Server,
) -> None:
    """A damaged value is written over; one without an end gets one."""
    with closing(open_store(own_redis.url, OPTIONS).blocks) as store:
        key, name = make_key(0), str(make_key(0))
        for damaged in (b"x" * 100, b"short"):
            own_redis.do("SET", name, damaged, "PX", 500_000)
            put = store.put([source(key)], ttl_s=1, deadline=soon())
            assert put.outcomes == [DONE]
            entry = target(key)
            assert store.get([entry], deadline=soon()).outcomes == [DONE]
            assert is_right(entry)
            assert own_redis.do("PTTL", name) > 400_000
        own_redis.do("SET", name, b"for ever")
        store.put([source(key)], ttl_s=100, deadline=soon())
        assert 0 < own_redis.do("PTTL", name) <= 100_000


# --- D18: URLs, and what must not be seen -------------------------------------------


def test_d18_the_database_of_the_url_is_used(own_redis: Server) -> None:
    for url in (
        f"{own_redis.url}/3",
        f"valkey://127.0.0.1:{own_redis.port}/3",
        f"unix://{own_redis.socket_path}?db=3",
    ):
        with closing(open_store(url, OPTIONS).blocks) as store:
            store.put([source(make_key(0))], ttl_s=100, deadline=soon())
        with redis.Redis(port=own_redis.port, db=3) as client:
            assert client.dbsize() == 1
            client.flushall()


@pytest.mark.parametrize("scheme", ["redis", "redis+sentinel", "redis+cluster"])
def test_d18_a_password_is_never_in_an_error(
    fake: FaultProxy, scheme: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not even if the server repeats it."""
    path = "/sam" if "sentinel" in scheme else ""
    query = "?sentinel_password=p%40ss" if "sentinel" in scheme else ""
    says = error("ERR unknown command 'AUTH', with args beginning with: 'u' 'p@ss'")
    everything = ("AUTH", "CLUSTER", "GET", "SENTINEL", "HELLO")
    fake.add(Fault(commands=everything, reply=says))
    url = f"{scheme}://u:p%40ss@127.0.0.1:{fake.port}{path}{query}"
    opened = open_store(url, OPTIONS)
    with closing(opened.blocks) as store:
        result = store.get([target(make_key(0))], deadline=soon())
        assert result.outcomes == [FAILED]
        seen = f"{result.error!r}{store!r}{vars(store)!r}{capfd.readouterr()}"
    assert "p@ss" not in seen
    assert "p%40ss" not in seen


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:s3cret@host:port/0",
        "redis://u:s3cret@host/zero",
        "redis://u:s3cret@host/0?x=y",
        "redis://u:s3cret@host?socket_timeout=9",
        "redis://u:s3#cret@host/0",
        "redis://u:s3cret@host:99999999/0",
        "unix://u:s3cret@",
        "redis+sentinel://u:s3cret@h1,h2",
        "redis+cluster://u:s3cret@h1,h2/3",
        "redis+cluster://u:s3cret@h1,,h2",
        "redis+nothing://u:s3cret@h1",
        "redis:u:s3cret@h1",
    ],
)
def test_d18_a_wrong_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_store(url, OPTIONS)
    text = str(caught.value) + repr(caught.value.__cause__)
    assert "s3" not in text
    assert "cret" not in text


def test_d18_a_wrong_password_is_denied(tmp_path: Path, own_redis: Server) -> None:
    own_redis.do("CONFIG", "SET", "requirepass", "right")
    for credentials in ("", ":wrong@", "user:wrong@"):
        url = f"redis://{credentials}127.0.0.1:{own_redis.port}/1"
        with closing(open_store(url, OPTIONS).blocks) as store:
            result = store.get([target(make_key(0))], deadline=soon())
        assert result.outcomes == [FAILED]
        assert isinstance(result.error, StoreDenied), (credentials, result.error)
        assert "wrong" not in str(result.error)
    own_redis.admin = lambda: redis.Redis(port=own_redis.port, password="right")


# --- D19: a writer that dies leaves nothing in the way ------------------------------

_WRITER = """
import sys, time
from sam_backends.redis_store import open_store
from tests.backends.builders import OPTIONS, make_key, source
store = open_store(sys.argv[1], OPTIONS).blocks
entries = [source(make_key(n), 8 << 20) for n in range(4)]
print("ready", flush=True)
while True:
    store.put(entries, ttl_s=100, deadline=time.monotonic() + 10)
"""


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_d19_a_writer_killed_in_the_middle_leaves_all_or_nothing(
    embedded: EmbeddedServer,
) -> None:
    keys = make_keys(4)
    with closing(open_store(embedded.url, OPTIONS).blocks) as store:
        for turn in range(4):
            store.delete(keys, deadline=soon())
            writer = subprocess.Popen(
                [sys.executable, "-c", _WRITER, embedded.url], stdout=subprocess.PIPE
            )
            with writer:
                assert writer.stdout is not None
                writer.stdout.readline()
                time.sleep(0.005 * turn)
                writer.kill()
            entries = targets(keys, 8 << 20)
            outcomes = store.get(entries, deadline=soon()).outcomes
            for entry, outcome in zip(entries, outcomes, strict=True):
                assert outcome is MISSING or (outcome is DONE and is_right(entry))
            put = store.put(sources(keys, 8 << 20), ttl_s=100, deadline=soon())
            assert put.outcomes == [DONE] * 4
        store.delete(keys, deadline=soon())


# --- D22: no event loop -------------------------------------------------------------


def test_d22_loops_and_threads_may_come_and_go(redis_7: Server) -> None:
    """A store belongs to no loop: made in one, used in others and in none."""

    async def make() -> StoreBackend:
        return open_store(redis_7.url, OPTIONS).blocks

    async def use(store: StoreBackend) -> None:
        assert await asyncio.to_thread(_all_done, store, make_keys(3))

    store = asyncio.run(make())
    with closing(store):
        for _ in range(2):
            asyncio.run(use(store))
        thread = threading.Thread(target=_all_done, args=(store, make_keys(3)))
        thread.start()
        thread.join()
        assert _all_done(store, make_keys(3))


def _name(number: int) -> bytes:
    return str(make_key(number)).encode()


def _all_done(store: StoreBackend, keys: list[StoreKey]) -> bool:
    """Writes and reads values, in all ways."""
    entries = targets(keys)
    results = [
        store.put(sources(keys), ttl_s=100, deadline=soon()),
        store.get(entries, deadline=soon()),
        store.exists(keys, deadline=soon()),
        store.touch(keys, ttl_s=100, deadline=soon()),
    ]
    for result in results:
        assert result.outcomes == [DONE] * len(keys), result.error
    return all(map(is_right, entries))


def _calls(store: StoreBackend, manifests: ManifestStore):  # type: ignore[no-untyped-def]
    """Every call of both ports; each takes a deadline and returns an outcome."""
    key, manifest_key = make_key(0), make_manifest_key()
    record = ManifestRecord(1, b"x")
    return [
        lambda end: store.put([source(key)], ttl_s=9, deadline=end).outcomes[0],
        lambda end: store.get([target(key)], deadline=end).outcomes[0],
        lambda end: store.exists([key], deadline=end).outcomes[0],
        lambda end: store.delete([key], deadline=end).outcomes[0],
        lambda end: store.touch([key], ttl_s=9, deadline=end).outcomes[0],
        lambda end: manifests.read(manifest_key, max_bytes=9, deadline=end).outcome,
        lambda end: manifests.write(manifest_key, record, ttl_s=9, deadline=end),
        lambda end: manifests.touch(manifest_key, ttl_s=9, deadline=end),
    ]
