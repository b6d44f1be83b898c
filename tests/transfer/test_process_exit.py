"""A process that made a copy engine and never closed it can still exit."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import torch

from sam_connector.transfer import (
    CopyJob, Direction, GroupCopy, HostPool, SlotLayout, make_copy_engine
)

NUM_BLOCKS, BLOCK_BYTES = 2048, 64 * 1024
groups = {0: [torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)]}
layout = SlotLayout.of(groups)
pool = HostPool(NUM_BLOCKS, layout.slot_bytes)
engine = make_copy_engine(
    groups, layout, pool, device=torch.device("cpu"), num_threads=2
)
every = list(range(NUM_BLOCKS))
for job_id in range(%d):
    engine.submit(CopyJob(job_id, Direction.STORE, (GroupCopy(0, every, every),)))
print("in flight:", engine.num_in_flight, flush=True)
%s
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("num_jobs", "last_words", "code"),
    [
        (200, "", 0),
        (0, "", 0),
        (200, "raise SystemExit(3)", 3),
        (200, "raise RuntimeError", 1),
    ],
    ids=["copying", "idle", "exits", "fails"],
)
def test_s06_a_process_exits_though_nobody_closed_its_engine(
    num_jobs: int, last_words: str, code: int
) -> None:
    """Neither a thread that copies nor one that waits for work keeps it alive."""
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM % (num_jobs, last_words)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    said, num_in_flight = ended.stdout.rsplit(maxsplit=1)
    assert said == "in flight:"
    assert bool(int(num_in_flight)) == bool(num_jobs)
