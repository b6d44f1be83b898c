"""How much of what is measured."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

KIB, MIB = 1 << 10, 1 << 20
BLOCK_SIZES = (16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
#: For everything but the table of block sizes: small, usual, large.
SOME_BLOCK_SIZES = (32 * KIB, 256 * KIB, 4 * MIB)
JOB_SIZES = (1, 16, 256, 4096)

#: Both sides together are many times the last-level cache of any CPU or GPU.
_NUM_BYTES = {"cpu": 256 * MIB, "cuda": 1024 * MIB}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Attributes:
    device: where the blocks lie.
    num_bytes: of all blocks together, and of all slots.
    repeats: of each side, in turns.
    num_threads: that copy on a CPU.
    huge_pages: for the blocks, if they lie on a CPU; the slots ask for them anyway.
    block_sizes: in bytes, each a divisor of ``num_bytes``.
    some_block_sizes: those measured with several jobs.
    job_sizes: blocks a job.
    compute_s: how long one piece of computing takes that copies are beside.
    """

    device: torch.device
    num_bytes: int
    repeats: int
    num_threads: int
    huge_pages: bool = False
    block_sizes: tuple[int, ...] = BLOCK_SIZES
    some_block_sizes: tuple[int, ...] = SOME_BLOCK_SIZES
    job_sizes: tuple[int, ...] = JOB_SIZES
    compute_s: float = 0.06

    @classmethod
    def of(cls, options: argparse.Namespace) -> Settings:
        num_bytes = _NUM_BYTES[options.device]
        return cls(
            device=torch.device(options.device),
            num_bytes=num_bytes // 4 if options.quick else num_bytes,
            repeats=5 if options.quick else 7,
            num_threads=options.threads,
            huge_pages=options.huge_pages and options.device == "cpu",
        )
