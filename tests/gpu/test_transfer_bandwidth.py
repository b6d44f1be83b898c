"""The benchmark on a real device, small: that it ends, and that every byte is right."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
import torch

from benchmarks.transfer_bandwidth import __main__ as program
from benchmarks.transfer_bandwidth.settings import KIB, MIB, Settings
from benchmarks.transfer_bandwidth.summary import AIMS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def test_all_but_the_store(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(
        device=torch.device("cuda"),
        num_bytes=16 * MIB,
        repeats=2,
        num_threads=2,
        block_sizes=(32 * KIB, 256 * KIB),
        some_block_sizes=(32 * KIB, 4 * MIB),
        compute_s=0.005,
    )
    monkeypatch.setattr(Settings, "of", lambda options: settings)
    arguments = ["--device", "cuda", "--no-store", "--json"]
    assert program.main(arguments) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert AIMS["cuda"].keys() <= found.keys()
    assert found["cuda_vs_memcpy_async_32k"] > 0
    assert found["cuda_vs_swap_blocks_32k"] > 0
    assert {row["swap_blocks_by"] for row in found["rows"]} <= {"vllm", "torch"}
