"""Which blocks make one value."""

from __future__ import annotations

import pytest

from sam_connector.config import StoreConfig
from sam_connector.connector.tier.values import Value, ValueShape
from sam_connector.core.types import BlockHash, GroupId

G = GroupId(0)
MIB = 1 << 20


def hashes(text: str) -> list[BlockHash]:
    return [BlockHash(letter.encode()) for letter in text]


def text(value: Value | None) -> str | None:
    return None if value is None else b"".join(value.hashes).decode()


def shape(num_blocks: int) -> ValueShape:
    return ValueShape({G: num_blocks}, {G: 1})


@pytest.mark.parametrize(
    ("record_bytes", "num_blocks", "num_parts"),
    [
        (16 << 10, 32, 1),
        (200 << 10, 3, 1),
        (512 << 10, 1, 1),
        (2 * MIB, 1, 1),
        (4 * MIB, 1, 1),
        (4 * MIB + 1, 1, 2),
        (16 * MIB, 1, 4),
    ],
)
def test_small_blocks_are_grouped_and_large_ones_cut(
    record_bytes: int, num_blocks: int, num_parts: int
) -> None:
    found = ValueShape.of({G: record_bytes}, StoreConfig())
    assert (found.num_blocks[G], found.num_parts[G]) == (num_blocks, num_parts)


def test_a_sequence_is_values_and_perhaps_a_rest() -> None:
    assert [text(v) for v in shape(3).values(G, hashes("abcdefgh"))] == [
        "abc",
        "def",
        "gh",
    ]
    assert [text(v) for v in shape(1).values(G, hashes("ab"))] == ["a", "b"]
    assert list(shape(3).values(G, [])) == []


def test_a_range_has_no_value_that_begins_before_it() -> None:
    tail = hashes("efgh")  # blocks 4 to 7
    assert [text(v) for v in shape(3).values(G, tail, 4)] == ["gh"]
    assert [text(v) for v in shape(2).values(G, tail, 4)] == ["ef", "gh"]


def test_a_value_bears_its_last_block_s_name() -> None:
    [value] = shape(3).values(G, hashes("abc"))
    assert value.chunk == (G, b"c")
    assert value.contents == [(G, b"a"), (G, b"b"), (G, b"c")]


@pytest.mark.parametrize(
    ("index", "expected"), [(0, "abc"), (2, "abc"), (3, "def"), (6, None), (7, None)]
)
def test_a_request_knows_of_whole_values_only(index: int, expected: str | None) -> None:
    assert text(shape(3).value_at(G, hashes("abcdefgh"), index)) == expected
