from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from benchmarks.core_ops import longest_step
from benchmarks.core_ops.longest_step import LongContexts, longest_steps

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longest_step, "CONTEXT_BLOCKS", 16)
    monkeypatch.setattr(longest_step, "NUM_REPEATS", 2)


def test_every_kind_of_step_is_timed() -> None:
    assert set(longest_steps(16 * 10)) == {
        "expiry",
        "release",
        "evict",
        "evict_running",
        "idle_tick",
        "expiry_of_all",
    }


def test_each_step_does_what_it_is_called() -> None:
    contexts = LongContexts(16 * 10)
    manager = contexts.manager
    for name, run in contexts.events():
        before = manager.stats()
        run()
        manager.check_integrity()
        after = manager.stats()
        lost = before.protected_blocks - after.protected_blocks
        match name:
            case "expiry":
                assert lost == 16
                assert after.contexts == before.contexts
            case "release" | "evict" | "evict_running":
                assert after.contexts == before.contexts - 1
            case "idle_tick":
                assert after == before
            case "expiry_of_all":
                # Four contexts are left, and all of their leases end in one step.
                assert lost == 16 * 4
