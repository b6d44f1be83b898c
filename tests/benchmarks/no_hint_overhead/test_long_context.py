from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from benchmarks.no_hint_overhead import long_context
from benchmarks.scheduler_harness import check_idle_pool

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_context, "NUM_BLOCKS", 64)


def test_each_turn_grows_by_eight_blocks_and_finds_the_rest_cached() -> None:
    session = long_context.LongSession("sam", hinted=True, num_turns=3)
    session.complete_turn()
    host = long_context._host(session.scheduler)
    # The last token of an answer has no KV, so its block is not whole.
    sizes = []
    for _ in range(3):
        assert session.complete_turn() > 0
        sizes.append(host.manager.stats().protected_blocks)
    assert sizes == [64, 72, 80]
    check_idle_pool(session.scheduler)
    session.close()


def test_pairs_have_both_arms() -> None:
    ours_ns, stock_ns = long_context.completion_pairs(2)
    assert len(ours_ns) == len(stock_ns) == 2


def test_every_event_gives_the_blocks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    worst = long_context.worst_steps(num_repeats=1)
    assert worst.worst_ms == max(worst.evict_ms, worst.edit_ms, worst.expiry_ms) > 0


def test_session_that_stays_protected_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RuntimeError, match="not given up"):
        long_context._worst_step(lambda session: None, 60.0)
