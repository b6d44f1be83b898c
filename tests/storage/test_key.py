"""Names: golden vectors, and that nothing a client says can alias another's."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sam_connector.core.types import BlockHash, GroupId, SessionKey
from sam_connector.storage.key import ManifestKey, StoreKey

H = BlockHash(bytes(range(32)))
HEX = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
F = "0123456789abcdef0123456789abcdef"

GOLDEN = [
    (StoreKey("", F, GroupId(0), 0, H), f"sam1::{F}:0:0:{HEX}:0"),
    (StoreKey("", F, GroupId(1), 0, H), f"sam1::{F}:1:0:{HEX}:0"),
    (StoreKey("", F, GroupId(0), 7, H), f"sam1::{F}:0:7:{HEX}:0"),
    (StoreKey("", F, GroupId(0), 0, H, 3), f"sam1::{F}:0:0:{HEX}:3"),
    (StoreKey("acme", F, GroupId(0), 0, H), f"sam1:acme:{F}:0:0:{HEX}:0"),
    (StoreKey("a:b", F, GroupId(0), 0, H), f"sam1:a%3Ab:{F}:0:0:{HEX}:0"),
    (StoreKey("a b", F, GroupId(0), 0, H), f"sam1:a%20b:{F}:0:0:{HEX}:0"),
    (StoreKey("a%b", F, GroupId(0), 0, H), f"sam1:a%25b:{F}:0:0:{HEX}:0"),
    (StoreKey("a@b", F, GroupId(0), 0, H), f"sam1:a%40b:{F}:0:0:{HEX}:0"),
    (StoreKey("a/b", F, GroupId(0), 0, H), f"sam1:a%2Fb:{F}:0:0:{HEX}:0"),
    (StoreKey("ä", F, GroupId(0), 0, H), f"sam1:%C3%A4:{F}:0:0:{HEX}:0"),
    (StoreKey("{a}", F, GroupId(0), 0, H), f"sam1:%7Ba%7D:{F}:0:0:{HEX}:0"),
    (StoreKey("", F, GroupId(0), 0, BlockHash(b"\x00")), f"sam1::{F}:0:0:00:0"),
    (StoreKey("", F, GroupId(0), 0, BlockHash(b"\xff" * 2)), f"sam1::{F}:0:0:ffff:0"),
    (
        StoreKey("", f"{F}-1a2b3c4d", GroupId(0), 0, H),
        f"sam1::{F}-1a2b3c4d:0:0:{HEX}:0",
    ),
    (StoreKey("sam1", F, GroupId(0), 0, H), f"sam1:sam1:{F}:0:0:{HEX}:0"),
    (StoreKey("0", F, GroupId(10), 11, H, 12), f"sam1:0:{F}:10:11:{HEX}:12"),
    (StoreKey("", "0" * 32, GroupId(0), 0, H), f"sam1::{'0' * 32}:0:0:{HEX}:0"),
    (StoreKey("\n", F, GroupId(0), 0, H), f"sam1:%0A:{F}:0:0:{HEX}:0"),
    (StoreKey("日", F, GroupId(0), 0, H), f"sam1:%E6%97%A5:{F}:0:0:{HEX}:0"),
]


@pytest.mark.parametrize(("key", "text"), GOLDEN)
def test_h13_a_key_is_spelled_one_way(key: StoreKey, text: str) -> None:
    assert str(key) == text
    assert StoreKey.parse(text) == key


tenants = st.text(max_size=20)
hashes = st.binary(min_size=1, max_size=64).map(BlockHash)
keys = st.builds(
    StoreKey,
    tenants,
    st.text("0123456789abcdef-", min_size=1, max_size=40),
    st.integers(0, 99).map(GroupId),
    st.integers(0, 999),
    hashes,
    st.integers(0, 9),
)


@given(keys)
def test_h12_a_key_survives_the_way_through_its_text(key: StoreKey) -> None:
    assert StoreKey.parse(str(key)) == key


@given(keys, keys)
def test_h03_two_keys_have_two_names(one: StoreKey, other: StoreKey) -> None:
    assert (str(one) == str(other)) == (one == other)


@pytest.mark.parametrize(
    "text", ["", "sam1", "sam2::a:0:0:00:0", "sam1::a:0:0:zz:0", "sam1::a:x:0:00:0"]
)
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        StoreKey.parse(text)


HOSTILE = [
    "s",
    "t:s",
    "sam1m",
    f"sam1::{F}:0:0:{HEX}:0",
    HEX,
    "s\x00",
    "s ",
    "",
    "%3A",
    ":",
]


def test_h04_no_session_id_can_look_like_another_s_or_like_a_block() -> None:
    names = {
        str(ManifestKey(SessionKey(tenant, session_id), F))
        for tenant, session_id in itertools.product(["", "t", "t:s"], HOSTILE)
    }
    assert len(names) == 3 * len(HOSTILE)
    blocks = {text for _, text in GOLDEN}
    assert not names & blocks
    for name in names:
        with pytest.raises(ValueError, match=r"not a block.s name|unpack"):
            StoreKey.parse(name)


def test_h03_a_part_of_one_name_is_never_a_part_of_the_next() -> None:
    four = {
        str(ManifestKey(SessionKey("a", "b:c"), F)),
        str(ManifestKey(SessionKey("a:b", "c"), F)),
        str(ManifestKey(SessionKey("a%3Ab", "c"), F)),
        str(ManifestKey(SessionKey("", "a:b:c"), F)),
    }
    assert len(four) == 4


def test_a_manifest_of_another_model_has_another_name() -> None:
    session = SessionKey("", "s")
    assert str(ManifestKey(session, F)) != str(ManifestKey(session, "0" * 32))
