"""Faults that others had in public, by the numbers of ``tests/known_faults.md``.

Only those that the core can have; each race's guard is removed in ``test_mutants``.
"""

from __future__ import annotations

import ast
import math
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import sam_connector
import sam_connector.core
from sam_connector.core.limits import Limits
from sam_connector.core.ttl import LeaseTable
from sam_connector.core.types import SessionHint, Zone
from sam_connector.core.zoned_queue import ZonedFreeQueue
from tests.core.builders import EVICT, G0, Engine, chain, key
from tests.core.pool import FakeBlock

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def imports_of_the_core() -> dict[str, set[str]]:
    """Top-level modules that each file of the core imports."""
    imports: dict[str, set[str]] = {}
    for path in Path(sam_connector.core.__file__).parent.glob("*.py"):
        names = imports.setdefault(path.name, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
    return imports


# --- L: liveness and memory bounds ------------------------------------------


def test_l03_an_allocation_that_cannot_be_served_fails_at_once() -> None:
    engine = Engine(num_blocks=9)
    engine.turn("s", "abcdef", ttl=3600)
    engine.fill(2)
    for num_blocks in (7, 100):
        with pytest.raises(ValueError, match="cannot get"):
            engine.fill(num_blocks)
    with pytest.raises(ValueError, match="cannot take"):
        engine.pool.free_queue.popleft_n(7)
    # A refused allocation costs nobody anything.
    assert engine.pool.zone_contents()[2] == "fedcba"


def test_l03_relief_ends_though_nothing_can_be_given_up() -> None:
    engine = Engine(num_blocks=13, limits=Limits(idle_ttl_s=0.0))
    for name in ("a", "x"):
        engine.start(name, name)
    engine.turn("leased", "pqr", ttl=100)
    engine.now = math.floor(engine.now) + 1.0
    engine.fill(10)
    assert engine.manager.stats().leases_broken == 3


def test_l03_nothing_in_the_core_can_wait() -> None:
    waiting = {"asyncio", "select", "socket", "subprocess", "threading", "queue"}
    for name, imported in imports_of_the_core().items():
        assert not imported & waiting, name
        assert "time" not in imported or name == "clock.py"


def test_l06_a_wholly_protected_pool_serves_every_allocation() -> None:
    engine = Engine(num_blocks=61, limits=Limits(max_protected_fraction=1.0))
    for number in range(10):
        engine.turn(f"s{number}", LETTERS[number * 6 : number * 6 + 6], ttl=10 + number)
    assert engine.pool.zone_contents()[0] == ""
    shortages: list[int] = []
    relieve = engine.pool.free_queue.on_shortage

    def count(num_missing: int) -> None:
        shortages.append(num_missing)
        relieve(num_missing)

    engine.pool.free_queue.on_shortage = count
    assert len(engine.fill(1)) == 1
    # In the documented order: who is due back last is given up first, tail first.
    assert engine.pool.free_contents().startswith(LETTERS[54:59][::-1])
    assert len(engine.fill(59)) == 59
    assert shortages == [1, 59]
    assert engine.manager.stats().leases_broken == 60
    engine.check_integrity()


def test_l07_leases_of_sessions_that_never_come_back_end_without_any_step() -> None:
    engine = Engine(limits=Limits(idle_ttl_s=60.0))
    for number in range(10_000):
        engine.turn(f"s{number}", "a", ttl=1)
        engine.now += 1e-6
    assert engine.manager.stats().protected_blocks == 1
    engine.now += 5
    engine.settle()
    assert engine.manager.stats().protected_blocks == 0
    assert engine.manager.stats().leases_expired > 9000
    engine.now += 65
    engine.settle()
    engine.assert_nothing_left()


def test_l09_a_session_that_ends_releases_its_own_claims_only() -> None:
    engine = Engine()
    engine.turn("parent", "abcdefghij", ttl=100)
    for number, name in enumerate(("one", "two", "three")):
        engine.turn(name, f"abcdefghij{number}", ttl=20 * (number + 1), parent="parent")
    shared = "abcdefghij"
    assert engine.ref_cnts(shared) == [4] * 10
    engine.edit("one", EVICT)
    assert engine.holds(shared) == [(3, 1100.0)] * 10
    engine.step(41)
    assert engine.holds(shared) == [(3, 1100.0)] * 10
    engine.edit("parent", EVICT)
    assert engine.holds(shared) == [(2, 1060.0)] * 10
    assert engine.pool.zone_contents()[2] == "2jihgfedcba"
    engine.check_integrity()
    assert engine.manager.free_session(key("parent"), tree=True) == 2
    assert engine.ref_cnts(shared) == [0] * 10
    engine.assert_nothing_left()


def test_l10_a_lease_is_renewed_at_boundaries_and_not_per_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    granted: list[float] = []
    grant = LeaseTable.grant

    def count(self: LeaseTable, context: Any, deadline: float) -> None:
        granted.append(deadline)
        grant(self, context, deadline)

    monkeypatch.setattr(LeaseTable, "grant", count)
    engine = Engine(num_blocks=1000)
    request_id = engine.start("s", "abc", ttl=60)
    for _ in range(500):
        engine.generate(request_id, "x")
        engine.step(1)
    engine.finish(request_id)
    # At assignment and at completion; the first ended in between.
    assert len(granted) == 2
    assert engine.manager.stats().timers == 1
    assert engine.deadlines("s") == {"abc" + "x" * 500: 60.0}


# --- M: the queue and the accounts of blocks --------------------------------


def test_m01_a_bad_count_raises_before_anything_changes() -> None:
    engine = Engine(num_blocks=9)
    engine.turn("s", "abc", ttl=60)
    engine.turn("u", "xy")
    before = engine.pool.zone_contents()
    for n in (-1, -100, 9, 10_000):
        with pytest.raises(ValueError, match="cannot take"):
            engine.pool.free_queue.popleft_n(n)
        assert engine.pool.zone_contents() == before
    assert engine.pool.free_queue.popleft_n(0) == []
    engine.check_integrity()


def test_m01_zones_partition_the_free_blocks_over_a_long_random_life() -> None:
    rng = random.Random(1)
    blocks = [FakeBlock(block_id) for block_id in range(40)]
    queue = ZonedFreeQueue(blocks, 40)
    claims = [
        queue.open_claim(n, Zone.C if n % 2 else Zone.B, n % 2 * float(n))
        for n in range(6)
    ]
    used: list[FakeBlock] = []
    for turn in range(20_000):
        action = rng.randrange(6)
        if action == 0:
            used += queue.popleft_n(rng.randint(0, min(6, queue.num_free_blocks)))
        elif action == 1 and queue.num_free_blocks:
            block = rng.choice(queue.get_all_free_blocks())
            queue.remove(block)
            used.append(block)
        elif action in (2, 3):
            rng.shuffle(used)
            count = rng.randint(0, len(used))
            freed, used = used[:count], used[count:]
            (queue.append_n if action == 2 else queue.prepend_n)(freed)
        elif action == 4:
            queue.claim(rng.choice(blocks), rng.choice(claims))
        else:
            claim, leased = rng.choice(claims), rng.random() < 0.5
            zone = Zone.C if leased else Zone.B
            queue.move_claim(claim, zone, leased * float(rng.randrange(9)))
        if turn % 20 == 0:
            queue.check_integrity()
        assert queue.num_free_blocks + len(used) == 40


@pytest.fixture(name="real_pool")
def _real_pool(kv_cache_utils: ModuleType) -> Any:
    """vLLM's own ``BlockPool`` over the zoned queue."""
    from vllm.v1.core.block_pool import BlockPool

    pool: Any = BlockPool(num_gpu_blocks=9, enable_caching=True, hash_block_size=16)
    free = pool.free_block_queue.get_all_free_blocks()
    for block in free:
        block.prev_free_block = block.next_free_block = None
    pool.free_block_queue = ZonedFreeQueue(free, 9)
    return pool


@pytest.mark.vllm
@pytest.mark.timeout(180)
def test_m03_null_and_duplicate_blocks_are_not_inserted_twice(real_pool: Any) -> None:
    queue = real_pool.free_block_queue
    claim = queue.open_claim("s", Zone.C, 5.0)
    blocks = real_pool.get_new_blocks(3)
    queue.claim(blocks[0], claim)
    real_pool.free_blocks([real_pool.null_block, blocks[0], blocks[0], blocks[1]])
    real_pool.free_blocks([blocks[0]])
    queue.check_integrity()
    assert queue.num_free_blocks == 7


@pytest.mark.vllm
@pytest.mark.timeout(180)
def test_m04_a_block_freed_twice_is_handed_out_once(real_pool: Any) -> None:
    blocks = real_pool.get_new_blocks(4)
    real_pool.free_blocks(blocks)
    real_pool.free_blocks(blocks[:2])
    for block in blocks:
        block.ref_cnt = 0
    handed_out = [block.block_id for block in real_pool.get_new_blocks(8)]
    assert sorted(handed_out) == list(range(1, 9))
    with pytest.raises(ValueError, match="Cannot get"):
        real_pool.get_new_blocks(1)


def test_m04_ending_a_claim_twice_in_a_row_inserts_nothing_twice() -> None:
    engine = Engine(num_blocks=9)
    engine.turn("s", "abc", ttl=60)
    running = engine.start("s", "abc")
    engine.edit("s", EVICT, EVICT)
    engine.manager.free_session(key("s"))
    engine.finish(running)
    engine.edit("s", EVICT)
    engine.check_integrity()
    assert sorted(b.block_id for b in engine.fill(8)) == list(range(1, 9))


def test_m06_an_old_claim_on_a_block_with_new_content_is_a_no_op() -> None:
    engine = Engine(num_blocks=5, limits=Limits(max_protected_fraction=1.0))
    engine.turn("old", "abcd", ttl=10)
    engine.turn("new", "wxyz", ttl=100)
    assert engine.holds("wxyz") == [(1, 1100.0)] * 4
    # The old lease ends, is evicted, is freed: the new content stays protected.
    engine.step(11)
    engine.edit("old", EVICT)
    engine.manager.free_session(key("old"))
    assert engine.pool.zone_contents() == ("", "", "zyxw")
    assert engine.manager.stats().protected_blocks == 4
    engine.check_integrity()


def test_m06_a_block_that_a_stranger_was_given_is_under_no_claim() -> None:
    engine = Engine(num_blocks=5, limits=Limits(max_protected_fraction=1.0))
    engine.turn("old", "abcd", ttl=100)
    engine.turn(None, "wxyz")
    assert engine.pool.zone_contents() == ("zyxw", "", "")
    engine.check_integrity()


def test_m06_a_request_with_other_content_in_its_blocks_claims_none_of_them() -> None:
    engine = Engine()
    engine.turn("owner", "abc", ttl=100)
    stranger = engine.start(None, "xyz")
    request_id = engine.add("s", ttl=60)
    engine.runs[request_id] = engine.runs[stranger]
    engine.runs[request_id].text = "pqr"
    engine.manager.on_blocks_assigned(request_id, engine.chains(request_id), engine.now)
    assert engine.ref_cnts("pqr") == [1, 1, 1]
    assert engine.manager.stats().claimed_blocks == 3
    engine.check_integrity()


def test_m06_content_that_was_lost_is_not_evicted_in_its_successors_name() -> None:
    engine = Engine(num_blocks=9)
    engine.turn("s", "abc", ttl=60)
    block = engine.pool.lookup(chain("abc"), G0)[1]
    engine.pool.uncache(block)
    engine.pool.cache(block, chain("q")[0], G0)
    engine.turn("u", "q", ttl=90)
    engine.edit("s", EVICT)
    engine.check_integrity()
    assert engine.pool.zone_contents()[2] == "q"


def test_m07_a_shared_block_is_counted_once() -> None:
    engine = Engine(num_blocks=101, limits=Limits(max_protected_fraction=1.0))
    text = "".join(chr(200 + number) for number in range(100))
    for number in range(5):
        engine.turn(f"s{number}", text, ttl=60)
    stats = engine.manager.stats()
    assert (stats.protected_blocks, stats.claimed_blocks) == (100, 100)
    assert stats.protected_blocks <= engine.num_blocks
    assert stats.records == 500
    assert engine.ref_cnts(text) == [5] * 100


# --- P: what of the HTTP faults reaches the core ----------------------------


def test_p09_two_requests_with_one_id_leave_no_count_behind() -> None:
    engine = Engine()
    request_id = engine.start("s", "abc", ttl=60)
    engine.num_requests -= 1
    assert engine.add("s", ttl=60) == request_id
    engine.check_integrity()
    engine.finish(request_id)
    engine.edit("s", EVICT)
    engine.assert_nothing_left()


@pytest.mark.parametrize("name", ["", "0123456789abcdef", "x" * 4096, "a b/ c\u2028é"])
def test_p12_request_ids_are_opaque(name: str) -> None:
    engine = Engine()
    engine.manager.on_request_added(name, SessionHint(session=key("s"), ttl_s=60))
    engine.admit(name, "abc")
    engine.finish(name)
    assert engine.deadlines("s") == {"abc": 60.0}


def test_p13_the_children_of_one_request_are_one_session() -> None:
    engine = Engine()
    for step in range(5):
        children = [engine.start("s", "abc" + "de"[:step] + str(n)) for n in range(4)]
        for request_id in children:
            engine.finish(request_id)
        engine.step(1)
    engine.check_integrity()
    stats = engine.manager.stats()
    assert stats.sessions == 1
    assert stats.timers <= Limits().max_contexts
    engine.step(3601)
    engine.step(3601)
    engine.assert_nothing_left()


def test_p15_a_request_without_an_id_creates_no_session() -> None:
    engine = Engine()
    engine.turn(None, "abc")
    assert engine.manager.stats().sessions == 0


# --- S: what is not there cannot be left behind -----------------------------


_ROOT = Path(sam_connector.__file__).parent.parent


def _imports_of_the_package() -> dict[str, set[str]]:
    """Modules imported by each file of ours, at whatever level."""
    root = Path(sam_connector.__file__).parent
    trees = [root, root.parent / "backends"]
    imports: dict[str, set[str]] = {}
    for path in (path for tree in trees for path in tree.rglob("*.py")):
        names = imports.setdefault(str(path.relative_to(root.parent)), set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
                names.add(node.module)
    return imports


def test_s03_no_shared_memory_and_no_file_is_made_that_a_kill_could_leave() -> None:
    for name, imported in _imports_of_the_package().items():
        made = {"mmap", "multiprocessing", "multiprocessing.shared_memory", "tempfile"}
        if name == "sam_connector/transfer/host_pool.py":
            # Private and anonymous: goes with the process however that ends.
            made -= {"mmap"}
        if name == "backends/sam_backends/embedded.py":
            made -= {"tempfile"}  # see tests/backends/test_embedded.py
        assert not imported & made, name


def test_s06_no_thread_is_started_that_could_keep_a_process() -> None:
    for name in _imports_of_the_package():
        if name.startswith("sam_connector/transfer/"):
            continue  # see tests/transfer/test_process_exit.py
        if name.startswith("sam_connector/storage/conformance"):
            continue  # checks, which wait for the threads they start
        if name == "backends/sam_backends/redis_store/direct.py":
            continue  # all that its threads do has a deadline
        text = (_ROOT / name).read_text()
        assert "ThreadPoolExecutor(" not in text, name
        assert text.count("threading.Thread(") == text.count("daemon=True"), name


def test_s13_nothing_is_ever_unpickled() -> None:
    unsafe = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle"}
    for name, imported in _imports_of_the_package().items():
        assert not imported & unsafe, name
