from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from benchmarks.store_bandwidth import whole_path
from benchmarks.store_bandwidth.whole_path import WholePath
from sam_connector.transfer.gather import GatherCopier

pytestmark = [pytest.mark.vllm, pytest.mark.redis]


@pytest.fixture
def path(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[WholePath]:
    monkeypatch.setattr(whole_path, "_NUM_BLOCKS", 8)
    path = WholePath(f"redis://127.0.0.1:{port}")
    yield path
    path.close()


def test_every_leg_and_both_ways_have_a_rate(path: WholePath) -> None:
    rates = path.measure(2)
    assert set(rates) == {
        *("block_to_slot", "slot_to_store", "store_to_slot", "slot_to_block"),
        *("out", "back", "out_slowest_leg", "back_slowest_leg"),
    }
    assert all(rate > 0 for rate in rates.values())


def test_blocks_that_do_not_come_back_are_noticed(
    path: WholePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GatherCopier, "copy", lambda *_: None)
    with pytest.raises(RuntimeError, match="wrong bytes"):
        path.measure(1)


def test_slots_that_were_never_written_are_noticed(
    path: WholePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The slots still have the bytes, so only the store could tell.
    monkeypatch.setattr(path, "_back", lambda: path._copy(whole_path.Direction.LOAD))
    with pytest.raises(RuntimeError, match="wrong bytes"):
        path.measure(1)
