"""The zoned queue: identical to vLLM's own until something is claimed."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest

from sam_connector.core.claim import Claim
from sam_connector.core.types import Zone
from sam_connector.core.zoned_queue import ZonedFreeQueue
from sam_connector.errors import IntegrityError
from tests.core.pool import FakeBlock


def make_blocks(num_blocks: int) -> list[FakeBlock]:
    return [FakeBlock(block_id) for block_id in range(num_blocks)]


def order(queue: Any) -> list[int]:
    return [block.block_id for block in queue.get_all_free_blocks()]


# --- identical to the queue it replaces -------------------------------------


def _random_operation(queues: list[Any], nodes: list[list[Any]], seed: int) -> None:
    """One call on every queue; the answers and all orders must be equal."""
    rng = random.Random(seed)
    free = order(queues[0])
    used = sorted(set(range(len(nodes[0]))) - set(free))
    rng.shuffle(used)
    chosen = used[: rng.randint(0, len(used))]
    name = rng.choice(
        ["popleft", "popleft_n", "remove", "append", "append_n", "prepend_n"]
    )
    if (name in ("popleft", "remove") and not free) or (name == "append" and not used):
        return
    n = rng.choice([0, min(1, len(free)), len(free), rng.randint(0, len(free))])
    target = rng.choice(free) if free else 0
    answers = []
    for queue, own in zip(queues, nodes, strict=True):
        answer: Any = None
        if name == "popleft":
            answer = queue.popleft().block_id
        elif name == "popleft_n":
            answer = [block.block_id for block in queue.popleft_n(n)]
        elif name == "remove":
            queue.remove(own[target])
        elif name == "append":
            queue.append(own[used[0]])
        else:
            getattr(queue, name)([own[block_id] for block_id in chosen])
        after = queue.iter_blocks_after(own[target] if target in free else None)
        answers.append((answer, order(queue), [b.block_id for b in after]))
    first, *others = answers
    assert all(answer == first for answer in others), name


@pytest.mark.vllm
@pytest.mark.timeout(180)  # the first import of vLLM takes a while
@pytest.mark.parametrize("num_blocks", [0, 1, 2, 9, 64])
def test_without_a_claim_it_is_identical_to_vllms_queue(
    kv_cache_utils: ModuleType, num_blocks: int
) -> None:
    """So is shadow mode, however much is claimed."""
    new_block = kv_cache_utils.KVCacheBlock
    nodes: list[list[Any]] = [
        [new_block(block_id) for block_id in range(num_blocks)] for _ in range(3)
    ]
    shadow = ZonedFreeQueue(nodes[2], num_blocks, enforce=False)
    queues: list[Any] = [
        kv_cache_utils.FreeKVCacheBlockQueue(nodes[0]),
        ZonedFreeQueue(nodes[1], num_blocks),
        shadow,
    ]
    claims = [shadow.open_claim(zone, zone, float(zone)) for zone in (Zone.B, Zone.C)]
    for seed in range(2000):
        for block in nodes[2][seed % 7 :: 7]:
            shadow.claim(block, claims[seed % 2])
        shadow.move_claim(claims[0], Zone.C, float(seed))
        _random_operation(queues, nodes, seed)
        assert queues[1].num_free_blocks == queues[0].num_free_blocks
        assert shadow.num_free_blocks == queues[0].num_free_blocks
        queues[1].check_integrity()
        shadow.check_integrity()


@pytest.mark.vllm
@pytest.mark.timeout(180)
def test_it_has_every_public_name_of_vllms_queue(kv_cache_utils: ModuleType) -> None:
    queue = kv_cache_utils.FreeKVCacheBlockQueue([])
    stock = {name for name in dir(queue) if name[0] != "_"}
    assert stock <= set(dir(ZonedFreeQueue([], 0)))


# --- one behaviour each -----------------------------------------------------


class Bench:
    """Free blocks, the n-th under the claim that the n-th letter names.

    ``A`` is unclaimed, lower-case letters are claims in zone B, ``B`` to ``Z`` claims
    there that are due back at 1 to 25, digits claims in zone C with that deadline.
    """

    def __init__(self, layout: str) -> None:
        self.blocks = make_blocks(len(layout))
        self.queue = ZonedFreeQueue(self.blocks, len(layout))
        self.claims: dict[str, Claim] = {}
        for block, name in zip(self.blocks, layout, strict=True):
            if name != "A":
                self.queue.claim(block, self.claim(name))
        self.queue.check_integrity()

    def claim(self, name: str) -> Claim:
        if name not in self.claims:
            place = (Zone.C, float(name)) if name.isdigit() else (Zone.B, 0.0)
            if name.isupper():
                place = (Zone.B, float(ord(name) - ord("A")))
            self.claims[name] = self.queue.open_claim(name, *place)
        return self.claims[name]

    def use(self, *block_ids: int) -> None:
        for block_id in block_ids:
            self.queue.remove(self.blocks[block_id])

    def free(self, *block_ids: int) -> None:
        self.queue.append_n([self.blocks[block_id] for block_id in block_ids])

    @property
    def order(self) -> list[int]:
        self.queue.check_integrity()
        return order(self.queue)


def test_blocks_are_taken_from_a_then_b_then_c() -> None:
    bench = Bench("5bA5bA")
    assert bench.order == [2, 5, 1, 4, 0, 3]
    taken = bench.queue.popleft_n(5)
    assert [block.block_id for block in taken] == [2, 5, 1, 4, 0]


def test_in_b_the_least_recently_used_claim_is_taken_first() -> None:
    bench = Bench("aabb")
    bench.use(0, 1)
    bench.free(1, 0)
    assert bench.order == [2, 3, 1, 0]


def test_the_whole_claim_moves_up_when_part_of_it_was_used() -> None:
    bench = Bench("aabb")
    bench.use(1)
    bench.free(1)
    assert bench.order == [2, 3, 0, 1]


def test_in_c_the_latest_deadline_is_taken_first() -> None:
    bench = Bench("152255")
    assert bench.order == [1, 4, 5, 2, 3, 0]


def test_in_b_who_will_be_back_follows_the_others_latest_first() -> None:
    bench = Bench("BbZA1Zc")
    assert bench.order == [3, 1, 6, 2, 5, 0, 4]
    bench.use(1)
    bench.free(1)
    assert bench.order == [3, 6, 1, 2, 5, 0, 4]


def test_use_does_not_move_who_has_said_when_it_will_be_back() -> None:
    bench = Bench("CCBB")
    bench.use(0)
    bench.free(0)
    assert bench.order == [1, 0, 2, 3]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ((Zone.B, 9.0), [2, 0, 1, 3, 4]),
        ((Zone.B, 0.5), [2, 3, 0, 1, 4]),
        ((Zone.B, 0.0), [2, 0, 1, 3, 4]),
        ((Zone.C, 0.5), [2, 3, 4, 0, 1]),
        ((Zone.C, 2.5), [2, 3, 0, 1, 4]),
    ],
)
def test_another_time_moves_the_whole_run(
    place: tuple[Zone, float], expected: list[int]
) -> None:
    bench = Bench("CCbB1")
    bench.queue.move_claim(bench.claim("C"), *place)
    assert bench.order == expected


def test_a_time_that_is_taken_back_counts_as_use() -> None:
    bench = Bench("bCaB")
    bench.queue.move_claim(bench.claim("C"), Zone.B)
    assert bench.order == [0, 2, 1, 3]
    bench.use(0)
    bench.free(0)
    assert bench.order == [2, 1, 0, 3]


def test_a_renewed_lease_moves_the_whole_run() -> None:
    bench = Bench("112233A")
    bench.queue.move_claim(bench.claim("1"), Zone.C, 9.0)
    assert bench.order == [6, 0, 1, 4, 5, 2, 3]
    bench.queue.move_claim(bench.claim("3"), Zone.B)
    assert bench.order == [6, 4, 5, 0, 1, 2, 3]


def test_the_listener_is_told_of_a_shortage_before_b_is_touched() -> None:
    bench = Bench("AAbb1")

    def expire(num_missing: int) -> None:
        assert num_missing == 1
        assert bench.queue.num_free_blocks == 5
        bench.queue.end_claim(bench.claim("1"))

    bench.queue.on_shortage = expire
    taken = bench.queue.popleft_n(3)
    assert [block.block_id for block in taken] == [0, 1, 4]
    assert bench.queue.num_unclaimed == 0


def test_a_claim_on_a_block_ends_when_it_is_handed_out() -> None:
    bench = Bench("b1")
    handed_out: list[tuple[int, object]] = []
    bench.queue.on_reassigned = lambda blocks, claim: handed_out.extend(
        (block.block_id, claim.owner) for block in blocks
    )
    bench.queue.popleft_n(2)
    assert handed_out == [(0, "b"), (1, "1")]
    bench.free(0, 1)
    assert bench.queue.num_unclaimed == 2


def test_who_had_a_block_hears_that_another_claim_takes_it() -> None:
    bench = Bench("bA1A")
    heard: list[tuple[int, object]] = []
    bench.queue.on_reclaimed = lambda block, claim: heard.append(
        (block.block_id, claim.owner)
    )
    bench.use(2, 3)
    bench.queue.claim_all(bench.blocks, bench.claim("5"))
    assert heard == [(0, "b"), (2, "1")]
    bench.free(2, 3)
    assert bench.order == [0, 1, 2, 3]


def test_a_claimed_block_in_use_returns_to_its_claim() -> None:
    bench = Bench("AAA")
    bench.use(1)
    bench.queue.claim(bench.blocks[1], bench.claim("1"))
    assert bench.order == [0, 2]
    bench.free(1)
    assert bench.order == [0, 2, 1]
    assert bench.queue.num_unclaimed == 2


@pytest.mark.parametrize(("front", "expected"), [(0, [0, 1, 2, 3]), (1, [2, 3, 0, 1])])
def test_an_ended_claim_joins_zone_a_in_one_piece(
    front: int, expected: list[int]
) -> None:
    bench = Bench("AA11")
    bench.queue.end_claim(bench.claim("1"), front=bool(front))
    assert bench.order == expected
    assert bench.queue.num_unclaimed == 4


def test_a_block_in_use_whose_claim_ended_is_an_ordinary_block() -> None:
    bench = Bench("A1A")
    bench.use(1)
    bench.queue.end_claim(bench.claim("1"), front=True)
    bench.free(1)
    assert bench.order == [0, 2, 1]
    assert bench.queue._num_claims == 0


def test_reuse_when_freed_puts_a_context_in_front_tail_first() -> None:
    bench = Bench("AAAA")
    bench.use(1, 2, 3)
    for block in bench.blocks[1:]:
        bench.queue.reuse_when_freed([block])
    bench.free(3, 2, 1)
    assert bench.order == [3, 2, 1, 0]
    assert bench.queue._num_claims == 0


def test_reuse_when_freed_leaves_a_free_block_where_it_is() -> None:
    bench = Bench("AA")
    bench.queue.reuse_when_freed([bench.blocks[1]])
    assert bench.order == [0, 1]


@pytest.mark.parametrize("name", ["b", "C", "1"])
@pytest.mark.parametrize(("before", "expected"), [(1, [3, 1, 2]), (0, [1, 2, 3])])
def test_a_split_claim_stays_where_it_was(
    name: str, before: int, expected: list[int]
) -> None:
    bench = Bench("A" + name * 3 + {"b": "c", "C": "B", "1": "0"}[name])
    bench.queue.split_claim(
        bench.claim(name), [bench.blocks[3]], owner="new", before=bool(before)
    )
    assert bench.order == [0, *expected, 4]


def test_unclaim_all_keeps_the_order() -> None:
    bench = Bench("1bA2bA")
    before = bench.order
    bench.queue.unclaim_all()
    assert bench.order == before
    assert bench.queue.num_unclaimed == 6


def test_a_detached_queue_tells_nobody() -> None:
    bench = Bench("1b")
    bench.queue.on_shortage = bench.queue.on_reassigned = None  # type: ignore[assignment]
    bench.queue.on_reclaimed = None  # type: ignore[assignment]
    bench.queue.detach()
    bench.queue.claim(bench.blocks[0], bench.claim("b"))
    bench.queue.claim(bench.blocks[0], bench.claim("1"))
    assert len(bench.queue.popleft_n(2)) == 2


def test_check_integrity_sees_every_kind_of_damage() -> None:
    def damage_links(bench: Bench) -> None:
        bench.blocks[3].prev_free_block = bench.blocks[0]

    def damage_zone(bench: Bench) -> None:
        bench.queue.claims[5] = None

    def damage_count(bench: Bench) -> None:
        bench.queue.num_free_blocks += 1

    def damage_boundary(bench: Bench) -> None:
        bench.queue._first_b = bench.blocks[3]

    def damage_run(bench: Bench) -> None:
        bench.claim("b").num_free -= 1

    def damage_order_in_b(bench: Bench) -> None:
        bench.claim("C").due_at = 0.5

    def damage_kind_in_b(bench: Bench) -> None:
        bench.claim("b").due_at = 7.0

    def damage_order(bench: Bench) -> None:
        bench.claim("1").due_at = 99.0
        bench.claim("2").due_at = 98.0

    for damage in (
        damage_links,
        damage_zone,
        damage_count,
        damage_boundary,
        damage_run,
        damage_order,
        damage_order_in_b,
        damage_kind_in_b,
    ):
        bench = Bench("AAbb12CB")
        damage(bench)
        with pytest.raises(IntegrityError):
            bench.queue.check_integrity()


@pytest.mark.parametrize(
    ("layout", "limit", "expected"),
    [
        ("AAA", 9, 3),
        ("AAA", 2, 2),
        ("AAbbcc11", 9, 6),
        ("AAbbcc11", 3, 3),
        ("bb11", 9, 2),
        ("1122", 9, 0),
        ("Abc", 0, 0),
        ("", 5, 0),
    ],
)
def test_blocks_outside_leases_are_counted_up_to_a_limit(
    layout: str, limit: int, expected: int
) -> None:
    assert Bench(layout).queue.num_unleased(limit) == expected


def test_blocks_in_use_are_not_counted() -> None:
    bench = Bench("AAbb11")
    bench.use(0, 2, 4)
    assert bench.queue.num_unleased(9) == 2
    bench.use(1, 3)
    assert bench.queue.num_unleased(9) == 0


def test_so_many_are_had_without_breaking_a_lease() -> None:
    bench = Bench("A1bc2b1A")
    taken = bench.queue.popleft_n(bench.queue.num_unleased(99))
    assert sorted(block.block_id for block in taken) == [0, 2, 3, 5, 7]
    assert bench.queue.num_unleased(99) == 0


def test_retained_blocks_are_listed_in_the_order_in_which_they_are_lost() -> None:
    bench = Bench("5bA5bcA1")
    listed = [block.block_id for block in bench.queue.retained()]
    assert listed == [1, 4, 5, 0, 3, 7]
    assert listed == bench.order[2:]
    assert list(Bench("AAA").queue.retained()) == []


def test_in_shadow_mode_nothing_is_retained() -> None:
    blocks = make_blocks(3)
    queue = ZonedFreeQueue(blocks, 3, enforce=False)
    queue.claim(blocks[0], queue.open_claim("x", Zone.C, 5.0))
    assert list(queue.retained()) == []
    assert queue.num_unleased(9) == 3


@pytest.mark.parametrize("num_taken", [1, 2])
def test_in_shadow_mode_a_claimed_block_is_reported_however_few_are_taken(
    num_taken: int,
) -> None:
    blocks = make_blocks(3)
    queue = ZonedFreeQueue(blocks, 3, enforce=False)
    handed_out: list[int] = []
    queue.on_reassigned = lambda blocks, claim: handed_out.extend(
        block.block_id for block in blocks
    )
    queue.claim(blocks[0], queue.open_claim("x", Zone.C, 5.0))
    assert [block.block_id for block in queue.popleft_n(num_taken)][:1] == [0]
    assert handed_out == [0]


def test_a_single_block_comes_from_a_claim_only_when_nothing_else_is_free() -> None:
    bench = Bench("Ab1")
    missing: list[int] = []
    bench.queue.on_shortage = missing.append
    assert [bench.queue.popleft().block_id for _ in range(3)] == [0, 1, 2]
    assert missing == [1, 1]
    assert bench.queue.num_taken == 3
    assert bench.order == []
    with pytest.raises(ValueError, match="No free blocks"):
        bench.queue.popleft()
    with pytest.raises(ValueError, match="cannot take 1 of 0"):
        bench.queue.popleft_n(1)


def test_blocks_of_many_claims_are_freed_each_to_its_own_run() -> None:
    bench = Bench("bcbAAc11")
    bench.use(*range(8))
    bench.free(7, 6, 5, 4, 3, 2, 1, 0)
    # A in order of arrival; then B by last use, each run in order of arrival; then C.
    assert bench.order == [4, 3, 5, 1, 2, 0, 7, 6]
    assert bench.queue.num_unclaimed == 2


@pytest.mark.parametrize(
    ("layout", "taken"),
    [
        ("AAbbbcc", [2]),
        ("AAbbbcc", [2, 3]),
        ("AAbbbcc", [2, 3, 4]),
        ("bb", [0, 1]),
        ("AA999555", [2, 3]),
        ("AA999555", [2, 3, 4]),
        ("bb99", [0, 1]),
        ("bbb99", [0, 1]),
        ("99", [0, 1]),
        ("CCCBB", [0, 1]),
        ("CCBB", [0, 1]),
        ("bCC9", [0, 1]),
        ("bCC9", [0]),
    ],
)
def test_what_is_put_back_is_first_in_line_again(layout: str, taken: list[int]) -> None:
    bench = Bench(layout)
    before = bench.order
    bench.use(*taken)
    with bench.queue.putting_back():
        bench.free(*taken)
    assert bench.order == before
    bench.use(*taken)
    bench.free(*taken)
    assert sorted(bench.order) == sorted(before)


def test_what_is_put_back_and_is_nobodys_any_more_goes_where_that_goes() -> None:
    bench = Bench("AAbb")
    bench.use(2)
    bench.queue.end_claim(bench.claim("b"))
    with bench.queue.putting_back():
        bench.free(2)
    assert bench.order == [0, 1, 3, 2]


def test_a_block_that_is_put_back_keeps_others_from_nothing() -> None:
    """Once it is over the queue is what it was."""
    bench = Bench("bb")
    with pytest.raises(RuntimeError), bench.queue.putting_back():
        raise RuntimeError
    bench.use(0)
    bench.free(0)
    assert bench.order == [1, 0]


def test_a_block_in_use_can_be_taken_from_whoever_holds_it() -> None:
    bench = Bench("bb1")
    lost: list[int] = []
    bench.queue.on_reassigned = lambda blocks, claim: lost.extend(
        block.block_id for block in blocks
    )
    bench.use(0, 2)
    bench.queue.disown(bench.blocks[0])
    bench.queue.disown(bench.blocks[2])
    bench.free(0, 2)
    assert lost == [0, 2]
    assert bench.order == [0, 2, 1]
    assert bench.queue.num_unclaimed == 2


def test_blocks_that_are_handed_out_are_counted() -> None:
    bench = Bench("AAbb1")
    bench.queue.popleft_n(3)
    bench.queue.popleft()
    with pytest.raises(ValueError, match="cannot take"):
        bench.queue.popleft_n(2)
    assert bench.queue.num_taken == 4
