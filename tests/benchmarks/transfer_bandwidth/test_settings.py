from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks.transfer_bandwidth import __main__ as program
from benchmarks.transfer_bandwidth.settings import KIB, MIB, Settings


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("flags", [[], ["--quick"]])
def test_what_is_moved_is_much_larger_than_a_cache(
    device: str, flags: list[str]
) -> None:
    options = program._parser().parse_args(["--device", device, *flags])
    settings = Settings.of(options)
    assert settings.device.type == device
    assert 2 * settings.num_bytes >= 128 * MIB
    sizes = (*settings.block_sizes, *settings.some_block_sizes)
    assert all(settings.num_bytes % size == 0 for size in sizes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_sizes_are_those_asked_for(device: str) -> None:
    settings = Settings.of(program._parser().parse_args(["--device", device]))
    assert min(settings.block_sizes) == 16 * KIB
    assert max(settings.block_sizes) == 4 * MIB
    assert {32 * KIB, 256 * KIB} <= set(settings.block_sizes)
    assert min(settings.job_sizes) == 1
    assert max(settings.job_sizes) == 4096
    # There is memory for the largest job of the smallest blocks.
    assert 4096 * min(settings.some_block_sizes) <= settings.num_bytes


def test_huge_pages_are_a_cpu_s() -> None:
    options = program._parser().parse_args(["--device", "cuda", "--huge-pages"])
    assert not Settings.of(options).huge_pages
