from __future__ import annotations

import pytest

from sam_connector.core.session_tree import SessionTree
from sam_connector.errors import IntegrityError
from tests.core.builders import key


def tree_of(*links: str, max_depth: int = 8) -> SessionTree:
    """``"ab"`` makes b the parent of a."""
    tree = SessionTree(max_depth)
    for link in links:
        assert tree.link(key(link[0]), key(link[1]))
    tree.check_integrity()
    return tree


def names(keys: object) -> str:
    return "".join(k.session_id for k in keys)  # type: ignore[attr-defined]


def test_children_come_before_their_parents() -> None:
    tree = tree_of("ba", "ca", "dc", "ed")
    order = names(tree.postorder(key("a")))
    assert sorted(order) == list("abcde")
    assert all(order.index(child) < order.index(p) for child, p in ("ba", "dc", "ed"))
    assert names(tree.postorder(key("d"))) == "ed"
    assert names(tree.postorder(key("stranger!"))) == "stranger!"


@pytest.mark.parametrize("link", ["aa", "ab", "ac", "ad"])
def test_a_cycle_is_refused_and_changes_nothing(link: str) -> None:
    tree = tree_of("ba", "cb", "dc")
    assert not tree.link(key(link[0]), key(link[1]))
    tree.check_integrity()
    assert tree.parent(key("a")) is None
    assert names(tree.postorder(key("a"))) == "dcba"


def test_linking_again_is_idempotent() -> None:
    tree = tree_of("ba", "ba", "ba")
    assert names(tree.children(key("a"))) == "b"
    assert len(tree) == 1


def test_a_new_parent_replaces_the_old_one() -> None:
    tree = tree_of("ba", "bc")
    assert tree.children(key("a")) == ()
    assert tree.parent(key("b")) == key("c")


def test_a_refused_link_keeps_the_old_parent() -> None:
    tree = tree_of("ba", "cb")
    assert not tree.link(key("b"), key("c"))
    assert tree.parent(key("b")) == key("a")


def test_the_depth_is_bounded() -> None:
    tree = tree_of("ba", "cb", "dc", max_depth=4)
    assert not tree.link(key("e"), key("d"))
    assert tree.link(key("e"), key("c"))


def test_unlinking_keeps_the_childs_own_children() -> None:
    tree = tree_of("ba", "cb")
    tree.unlink(key("b"))
    tree.unlink(key("b"))
    assert tree.children(key("a")) == ()
    assert tree.parent(key("c")) == key("b")
    tree.unlink(key("c"))
    tree.check_integrity()
    assert len(tree) == 0


def test_a_tree_built_from_its_leaves_can_be_walked_however_deep() -> None:
    tree = SessionTree(max_depth=8)
    for generation in range(5000):
        assert tree.link(key(f"{generation}"), key(f"{generation + 1}"))
    # Closing the chain needs a longer look than is allowed: refused, not looped.
    assert not tree.link(key("5000"), key("0"))
    assert len(list(tree.postorder(key("5000")))) == 5001


def test_check_integrity_sees_a_missing_link() -> None:
    tree = tree_of("ba")
    tree._children_of.clear()
    with pytest.raises(IntegrityError):
        tree.check_integrity()
