from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from benchmarks.no_hint_overhead import footprint
from benchmarks.no_hint_overhead.footprint import measure_footprint

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "CONTEXT_BLOCKS", 128)
    monkeypatch.setattr(footprint, "NUM_SESSIONS", (2, 6))


def test_parts_add_up_and_name_the_two_flat_arrays() -> None:
    found = measure_footprint()
    assert sum(found.parts.values()) == pytest.approx(found.ours)
    # A reference for each block in the queue, four bytes in the retention's array.
    assert found.parts["core/zoned_queue.py"] == pytest.approx(8.0, abs=8.0)
    assert found.parts["core/retention.py"] == pytest.approx(4.0, abs=8.0)
    # Hashes that vLLM would have let go with the request.
    assert found.parts["vllm"] > 32.0
    assert found.stock > 100.0


def test_pool_is_full_of_what_sessions_hold() -> None:
    scheduler = footprint._filled("sam", 2)
    host = scheduler.connector.scheduler_side.host  # type: ignore[union-attr]
    stats = host.manager.stats()
    assert stats.records == stats.claimed_blocks == 2 * footprint.CONTEXT_BLOCKS
    scheduler.shutdown()
