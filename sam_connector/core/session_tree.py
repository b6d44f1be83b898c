"""Which session was started by which: links only, no ownership."""

from __future__ import annotations

from collections.abc import Iterator

from sam_connector.core.types import SessionKey
from sam_connector.errors import IntegrityError


class SessionTree:
    """Parent and child links between sessions; a parent need not be known yet.

    Args:
        max_depth: longest chain of ancestors that ``link`` accepts.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._parent_of: dict[SessionKey, SessionKey] = {}
        self._children_of: dict[SessionKey, dict[SessionKey, None]] = {}

    def __len__(self) -> int:
        return len(self._parent_of)

    def parent(self, key: SessionKey) -> SessionKey | None:
        return self._parent_of.get(key)

    def children(self, key: SessionKey) -> tuple[SessionKey, ...]:
        return tuple(self._children_of.get(key, ()))

    def link(self, child: SessionKey, parent: SessionKey) -> bool:
        """Makes ``parent`` the parent of ``child``, replacing an earlier one.

        Returns:
            False, with nothing changed, if that would close a cycle or exceed the
            depth bound.
        """
        ancestor: SessionKey | None = parent
        for _ in range(self._max_depth):
            if ancestor == child:
                return False
            if ancestor is None:
                break
            ancestor = self._parent_of.get(ancestor)
        else:
            return False
        if self._parent_of.get(child) != parent:
            self.unlink(child)
            self._parent_of[child] = parent
            self._children_of.setdefault(parent, {})[child] = None
        return True

    def unlink(self, child: SessionKey) -> None:
        """Forgets the child's parent; its own children keep their link to it."""
        parent = self._parent_of.pop(child, None)
        if parent is not None:
            siblings = self._children_of[parent]
            del siblings[child]
            if not siblings:
                del self._children_of[parent]

    def postorder(self, key: SessionKey) -> Iterator[SessionKey]:
        """The session's descendants, children before their parents, then itself."""
        order, stack = [], [key]
        while stack:
            current = stack.pop()
            order.append(current)
            stack.extend(self._children_of.get(current, ()))
        return reversed(order)

    def check_integrity(self) -> None:
        links = {(c, p) for p, kids in self._children_of.items() for c in kids}
        if links != set(self._parent_of.items()):
            raise IntegrityError("parent and child links disagree")
