from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.store_bandwidth.workload import Workload, WrongBytesError


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    return Workload.make(tmp_path, size=1_000, num_bytes=8_500)


def test_all_programs_are_given_the_same(workload: Workload) -> None:
    assert workload.num_bytes == 8_000
    keys = workload.keys_path.read_text().splitlines()
    assert keys == [str(key) for key in workload.keys]
    assert len(set(keys)) == 8
    data = workload.values_path.read_bytes()
    assert data == b"".join(bytes(value) for value in workload.values)


def test_values_differ_from_each_other_and_from_nothing(workload: Workload) -> None:
    assert len({bytes(value) for value in workload.values}) == 8
    with pytest.raises(WrongBytesError, match="somebody"):
        workload.check("somebody")


def test_the_last_byte_of_the_last_value_counts(workload: Workload) -> None:
    for value, buffer in zip(workload.values, workload.buffers, strict=True):
        buffer[:] = value
    workload.check("somebody")
    workload.buffers[-1][-1] ^= 1
    with pytest.raises(WrongBytesError, match="somebody"):
        workload.check("somebody")


def test_what_was_read_before_is_gone(workload: Workload) -> None:
    for value, buffer in zip(workload.values, workload.buffers, strict=True):
        buffer[:] = value
    workload.clear()
    assert not any(any(buffer) for buffer in workload.buffers)
