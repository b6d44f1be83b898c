from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks.transfer_bandwidth.store_path import figures


def test_each_way_is_beside_its_slowest_leg() -> None:
    rates = {
        "block_to_slot": 10.0,
        "slot_to_store": 2.0,
        "store_to_slot": 4.0,
        "slot_to_block": 3.0,
        "out": 1.5,
        "back": 2.4,
    }
    assert figures(rates) == {
        "whole_path_out_gbs": 1.5,
        "whole_path_out_slowest_leg": "slot_to_store",
        "whole_path_out_slowest_leg_gbs": 2.0,
        "whole_path_out_vs_slowest_leg": 0.75,
        "whole_path_back_gbs": 2.4,
        "whole_path_back_slowest_leg": "slot_to_block",
        "whole_path_back_slowest_leg_gbs": 3.0,
        "whole_path_back_vs_slowest_leg": 0.8,
    }
