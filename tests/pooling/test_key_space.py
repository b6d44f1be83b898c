"""All that a chunk consists of."""

from __future__ import annotations

from sam_connector.core.types import GroupId
from tests.pooling.bench import chunk, key_space, session


def test_every_rank_has_its_share_in_as_many_parts() -> None:
    keys = key_space(num_ranks=2, num_parts={GroupId(0): 3})
    names = keys.keys(chunk("a"))
    assert [(key.rank, key.part) for key in names] == [
        *((0, part) for part in range(3)),
        *((1, part) for part in range(3)),
    ]
    assert len(set(map(str, names))) == 6


def test_a_manifest_is_a_tenant_s() -> None:
    keys = key_space()
    one = keys.manifest_key(session("s", "t"))
    other = keys.manifest_key(session("s", "u"))
    assert str(one) != str(other)


def test_another_fingerprint_names_other_values_and_manifests() -> None:
    one, other = key_space(), key_space(fingerprint="cd" * 16)
    assert not set(one.keys(chunk("a"))) & set(other.keys(chunk("a")))
    assert one.manifest_key(session("s")) != other.manifest_key(session("s"))
