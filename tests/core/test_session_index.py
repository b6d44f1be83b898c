from __future__ import annotations

import pytest

from sam_connector.core.session_index import Context, Session, SessionIndex
from sam_connector.errors import IntegrityError
from tests.core.builders import key


def index_of(*names: str) -> tuple[SessionIndex, list[Session]]:
    index = SessionIndex()
    return index, [index.add(key(name)) for name in names]


def lease(index: SessionIndex, session: Session) -> None:
    session.contexts.append(Context(session=session, deadline=5.0))
    index.touch(session)


def test_sessions_are_found_by_tenant_and_id() -> None:
    index, (session,) = index_of("a")
    assert index.get(key("a")) is session
    assert index.get(key("a", tenant="other")) is None
    assert len(index) == 1


def test_the_oldest_session_without_a_lease_is_dropped_first() -> None:
    index, (a, b, c) = index_of("a", "b", "c")
    lease(index, a)
    assert index.victim() is b
    index.touch(b)
    assert index.victim() is c


def test_a_leased_session_is_dropped_when_there_is_no_other() -> None:
    index, (a, b) = index_of("a", "b")
    lease(index, b)
    lease(index, a)
    assert index.victim() is b


def test_a_session_with_running_requests_is_never_dropped() -> None:
    index, (a, b) = index_of("a", "b")
    a.num_active = 1
    assert index.victim() is b
    b.num_active = 1
    assert index.victim() is None


def test_removing_is_idempotent() -> None:
    index, (a,) = index_of("a")
    index.remove(a)
    index.remove(a)
    assert len(index) == 0


def test_a_context_knows_whether_its_session_still_has_it() -> None:
    session = Session(key=key("a"))
    context = Context(session=session)
    assert not context.is_live
    session.contexts.append(context)
    assert context.is_live
    assert context.siblings == [context]


def test_check_integrity_sees_a_misfiled_session() -> None:
    index, (a,) = index_of("a")
    a.contexts.append(Context(session=a, deadline=5.0))
    with pytest.raises(IntegrityError, match="misfiled"):
        index.check_integrity()
    index.touch(a)
    index.check_integrity()
    index._unleased[a.key] = a
    with pytest.raises(IntegrityError, match="twice"):
        index.check_integrity()
