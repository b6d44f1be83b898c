from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from benchmarks.transfer_bandwidth.settings import KIB, MIB, Settings


@pytest.fixture
def settings() -> Settings:
    """Too little for figures, enough to have them all."""
    return Settings(
        device=torch.device("cpu"),
        num_bytes=2 * MIB,
        repeats=2,
        num_threads=2,
        block_sizes=(16 * KIB, 256 * KIB),
        some_block_sizes=(32 * KIB, 1024 * KIB),
        job_sizes=(1, 16, 256),
        compute_s=0.002,
    )
