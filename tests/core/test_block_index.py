"""The radix tree: shared prefixes once, and cost only for what is new."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from sam_connector.core.block_index import BlockIndex
from sam_connector.core.retention import Retention, Segment
from sam_connector.core.session_index import Context, Session
from sam_connector.core.types import NULL_BLOCK_ID, BlockHash, BlockId
from sam_connector.errors import IntegrityError
from tests.core.builders import G0, chain, key, text_of
from tests.core.pool import FakePool

NUM_BLOCKS = 65


class Bench:
    """An index over a pool that has a copy of whatever is held first."""

    def __init__(self) -> None:
        self.pool = FakePool(NUM_BLOCKS)
        self.retention = Retention(
            self.pool, num_blocks=NUM_BLOCKS, max_protected=NUM_BLOCKS
        )
        self.index = BlockIndex(self.retention)
        self.contexts: list[Context] = []

    def context(self, session: Session | None = None) -> Context:
        session = session or Session(key=key(f"s{len(self.contexts)}"))
        context = Context(session=session)
        session.contexts.append(context)
        self.contexts.append(context)
        return context

    def hold(
        self,
        context: Context,
        text: str,
        deadline: float = 0.0,
        num_leased: int | None = None,
    ) -> None:
        block_ids = []
        for block_hash in chain(text):
            copies = self.pool.cached.get((block_hash, G0))
            if not copies:
                (block,) = self.pool.get_new_blocks(1)
                self.pool.cache(block, block_hash, G0)
                self.pool.free_blocks([block])
                copies = self.pool.cached[block_hash, G0]
            block_ids.append(BlockId(next(iter(copies))))
        self.index.hold(
            context,
            G0,
            chain(text),
            block_ids,
            len(text),
            deadline=deadline,
            num_leased=num_leased,
        )
        self.check()

    def check(self) -> None:
        self.index.check_integrity(self.contexts)
        self.pool.check_integrity()

    def shape(self) -> list[str]:
        """The segments, as the text each of them adds."""
        return sorted(
            text_of(segment.hashes)[segment.start :]
            for segment in self.index.segments()
        )


def test_contexts_share_the_segments_of_a_common_prefix() -> None:
    bench = Bench()
    first, second = bench.context(), bench.context()
    bench.hold(first, "abcd")
    bench.hold(second, "abxy")
    assert bench.shape() == ["ab", "cd", "xy"]
    assert bench.index.num_records == 8
    assert [len(s.deadlines) for s in bench.index.path(second, G0)] == [2, 1]


def test_two_contexts_of_one_session_count_as_one_session() -> None:
    bench = Bench()
    session = Session(key=key("s"))
    bench.hold(bench.context(session), "abcd")
    bench.hold(bench.context(session), "abxy")
    assert {segment.num_sessions for segment in bench.index.segments()} == {1}


def test_a_growing_context_stays_one_segment() -> None:
    bench = Bench()
    context = bench.context()
    for end in range(1, 27):
        bench.hold(context, "abcdefghijklmnopqrstuvwxyz"[:end], deadline=10.0)
    assert len(bench.shape()) == 1


def test_growth_costs_the_new_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    context = bench.context()
    bench.hold(context, "abcdefghijklmnopqrstuvwxyz")
    attached: list[int] = []
    attach = bench.retention.attach

    def count(
        segment: Segment, offsets: Sequence[int], block_ids: Sequence[BlockId]
    ) -> None:
        attached.extend(segment.start + offset for offset in offsets)
        attach(segment, offsets, block_ids)

    monkeypatch.setattr(bench.retention, "attach", count)
    bench.hold(context, "abcdefghijklmnopqrstuvwxyz01")
    assert sorted(attached) == [26, 27]
    attached.clear()
    bench.hold(context, "abcdefghijklmnopqrstuvwxyz01")
    assert attached == []


def test_growth_next_to_another_context_does_not_grow_that_one() -> None:
    bench = Bench()
    first, second = bench.context(), bench.context()
    bench.hold(first, "ab")
    bench.hold(second, "ab")
    bench.hold(first, "abcd")
    assert bench.index.length(second, G0) == 2
    assert bench.shape() == ["ab", "cd"]


def test_growth_under_another_deadline_is_a_segment_of_its_own() -> None:
    bench = Bench()
    context = bench.context()
    bench.hold(context, "ab", deadline=10.0)
    bench.hold(context, "abcd", deadline=10.0, num_leased=2)
    assert bench.shape() == ["ab", "cd"]
    assert [s.expire_at for s in bench.index.path(context, G0)] == [10.0, 0.0]


def test_holding_less_gives_up_the_rest() -> None:
    bench = Bench()
    context = bench.context()
    bench.hold(context, "abcdef")
    bench.hold(context, "abc")
    assert bench.shape() == ["abc"]
    bench.hold(context, "")
    assert bench.shape() == []
    assert bench.index.num_records == 0
    assert context.leaves == {}


def test_diverging_gives_up_the_old_branch() -> None:
    bench = Bench()
    context = bench.context()
    bench.hold(context, "abcdef", deadline=5.0)
    bench.hold(context, "abxy", deadline=5.0)
    assert bench.shape() == ["abxy"]
    assert bench.index.num_records == 4


def test_a_deadline_is_the_latest_of_all_holders() -> None:
    bench = Bench()
    contexts = [bench.context() for _ in range(3)]
    for context, deadline in zip(contexts, (10.0, 30.0, 20.0), strict=True):
        bench.hold(context, "ab", deadline=deadline)
    (segment,) = bench.index.segments()
    assert segment.expire_at == 30.0
    bench.index.set_deadline(contexts[1], G0, 0.0)
    assert segment.expire_at == 20.0
    bench.index.release(contexts[2], G0)
    assert segment.expire_at == 10.0
    bench.check()


def test_a_released_middle_is_remembered_but_not_held() -> None:
    bench = Bench()
    context = bench.context()
    bench.hold(context, "abcdef")
    assert bench.index.release(context, G0, start=2, end=4) == 2
    bench.check()
    assert text_of(bench.index.hashes(context, G0)) == "abcdef"
    assert bench.index.num_held(context, G0) == 4
    assert bench.index.num_resident(context, G0) == 4
    bench.hold(context, "abcdef")
    assert bench.index.num_held(context, G0) == 6


def test_everything_released_leaves_nothing_once_it_is_forgotten() -> None:
    bench = Bench()
    context = bench.context()
    bench.hold(context, "abcdef")
    bench.index.release(context, G0, start=0, end=6)
    bench.check()
    assert bench.shape() == ["abcdef"]
    bench.index.release(context, G0)
    assert bench.shape() == []


def test_common_length_agrees_with_counting() -> None:
    bench = Bench()
    context = bench.context()
    rng = random.Random(7)
    for _ in range(20):
        bench.hold(bench.context(), "".join(rng.choices("ab", k=6)))
    text = "abababba"
    bench.hold(context, text)
    for _ in range(300):
        other = text[: rng.randint(0, 8)] + "".join(
            rng.choices("ab", k=rng.randint(0, 5))
        )
        counted = 0
        while counted < min(len(text), len(other)) and (
            text[counted] == other[counted]
        ):
            counted += 1
        assert bench.index.common_length(context, G0, chain(other)) == counted


def test_without_block_ids_nothing_is_resident() -> None:
    bench = Bench()
    context = bench.context()
    bench.index.hold(context, G0, chain("abc"), [NULL_BLOCK_ID], 3, deadline=0.0)
    assert bench.index.num_held(context, G0) == 3
    assert bench.index.num_resident(context, G0) == 0
    bench.check()


def test_check_integrity_sees_every_kind_of_damage() -> None:
    def wrong_sessions(segment: Segment, bench: Bench) -> None:
        segment.num_sessions += 1

    def wrong_deadline(segment: Segment, bench: Bench) -> None:
        segment.expire_at += 1.0

    def wrong_records(segment: Segment, bench: Bench) -> None:
        bench.index.num_records += 1

    def wrong_leaves(segment: Segment, bench: Bench) -> None:
        segment.num_leaves += 1

    def wrong_parent(segment: Segment, bench: Bench) -> None:
        child = next(iter(segment.children.values()))
        child.parent = child

    def wrong_hash(segment: Segment, bench: Bench) -> None:
        child = segment.children.popitem()[1]
        segment.children[BlockHash(b"?")] = child

    def lost_leaf(segment: Segment, bench: Bench) -> None:
        bench.contexts[1].leaves[G0] = Segment(G0, None, 0)

    for damage in (
        wrong_sessions,
        wrong_deadline,
        wrong_records,
        wrong_leaves,
        wrong_parent,
        wrong_hash,
        lost_leaf,
    ):
        bench = Bench()
        bench.hold(bench.context(), "abcd", deadline=5.0)
        bench.hold(bench.context(), "abxy", deadline=5.0)
        root = next(s for s in bench.index.segments() if s.parent is None)
        damage(root, bench)
        with pytest.raises(IntegrityError):
            bench.check()
