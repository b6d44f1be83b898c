"""Control calls, answered on the engine's thread between steps."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from sam_connector.connector.tier.host_tier import HostTier
from sam_connector.core.session_index import Context, Session
from sam_connector.core.types import (
    Edit,
    EditResult,
    EditStatus,
    EditType,
    SessionKey,
)
from sam_connector.protocol import control as wire
from sam_connector.protocol.results import result_to_wire
from sam_connector.vllm_adapter.host import SamHost

logger = logging.getLogger(__name__)

_MAX_WAITERS = 256


@dataclass(frozen=True, slots=True)
class _Waiter:
    """A client that waits until its operations have ended, up to a deadline."""

    answer: Future[str]
    session: SessionKey
    results: Sequence[EditResult]
    deadline: float


class ControlService:
    """Decodes control calls, applies them to the manager, encodes the answers.

    Args:
        host: the manager in its engine; ``None`` if session hints are off.
        tier: the host tier; ``None`` if there is none.
    """

    def __init__(self, host: SamHost | None, tier: HostTier | None) -> None:
        self._host = host
        self._tier = tier
        self._waiters: list[_Waiter] = []
        self._num_internal_errors = 0

    @property
    def has_waiters(self) -> bool:
        return bool(self._waiters)

    def switch_off(self) -> None:
        """Session management has failed; every later call says so."""
        self._num_internal_errors += 1
        self._host = None
        self.close()

    def close(self) -> None:
        """Answers whoever still waits with what is known."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            _resolve(waiter.answer, self._edits_reply(waiter.session, waiter.results))

    def handle(self, payload: str, *, is_paused: bool) -> str | Future[str]:
        """Answers one call.

        Args:
            payload: an encoded command of ``protocol.control``.
            is_paused: the engine sleeps or is paused: nothing may be moved.
        """
        try:
            command = wire.decode_command(payload)
        except ValueError as error:
            return wire.failure("invalid", str(error)).encode()
        if self._host is None:
            reason = (
                "session hints are off after an internal error; see the engine's log"
                if self._num_internal_errors
                else "session hints are off in this engine"
            )
            return wire.failure("unavailable", reason).encode()
        try:
            return self._dispatch(self._host, command, is_paused)
        except Exception:
            logger.exception("control call failed")
            return wire.failure("unavailable", "internal error").encode()

    def answer_waiters(self) -> None:
        """Answers clients whose operations have ended or whose time is up."""
        assert self._host is not None
        now = self._host.now()
        waiting = []
        for waiter in self._waiters:
            results = [self._current(result) for result in waiter.results]
            if now >= waiter.deadline or not any(map(_is_open, results)):
                _resolve(waiter.answer, self._edits_reply(waiter.session, results))
            else:
                waiting.append(waiter)
        self._waiters = waiting

    # --- commands ---------------------------------------------------------------------

    def _dispatch(
        self, host: SamHost, command: wire.Command, is_paused: bool
    ) -> str | Future[str]:
        match command:
            case wire.ApplyEdits():
                return self._apply_edits(host, command, is_paused)
            case wire.GetSession():
                reply = self._get_session(host, command)
            case wire.ListSessions():
                reply = self._list_sessions(host, command)
            case wire.SetLease():
                reply = self._set_lease(host, command)
            case wire.FreeSession():
                key = SessionKey(command.tenant, command.session_id)
                num_freed = host.free_session(key, tree=command.tree)
                reply = wire.success({"freed": num_freed}, found=num_freed > 0)
            case wire.GetOperation():
                reply = self._get_operation(host, command)
            case wire.GetStats():
                host.settle()
                reply = wire.success(self.stats())
            case wire.Reset():
                if self._tier is not None:
                    self._tier.reset(keep_store=command.keep_store)
                host.reset()
                reply = wire.success({"reset": True})
        return reply.encode()

    def _apply_edits(
        self, host: SamHost, command: wire.ApplyEdits, is_paused: bool
    ) -> str | Future[str]:
        key = SessionKey(command.tenant, command.session_id)
        edits = command.edits
        if is_paused and any(edit.type is not EditType.EVICT for edit in edits):
            results = [_rejected(edit, "the engine is paused") for edit in edits]
        else:
            results = host.apply_edits(key, edits)
        may_wait = command.wait_s > 0 and len(self._waiters) < _MAX_WAITERS
        if may_wait and any(map(_is_open, results)):
            answer: Future[str] = Future()
            deadline = host.now() + command.wait_s
            self._waiters.append(_Waiter(answer, key, results, deadline))
            return answer
        return self._edits_reply(key, results)

    def _edits_reply(self, key: SessionKey, results: Sequence[EditResult]) -> str:
        found = not all(r.status is EditStatus.NOT_FOUND for r in results)
        return wire.success(
            {
                "session_id": key.session_id,
                "results": [result_to_wire(result) for result in results],
            },
            found=found,
        ).encode()

    def _set_lease(self, host: SamHost, command: wire.SetLease) -> wire.Reply:
        key = SessionKey(command.tenant, command.session_id)
        resume_s = command.expected_resume_s
        status = host.set_lease(key, command.ttl, expected_resume_s=resume_s)
        if status is None:
            return wire.success(None, found=False)
        result = {"session_id": key.session_id, "ttl": command.ttl, "status": status}
        if resume_s is not None:
            result["expected_resume_s"] = resume_s
        if status is not EditStatus.COMPLETED:
            result["reason"] = "the protected share of the cache is used up"
        return wire.success(result)

    def _get_session(self, host: SamHost, command: wire.GetSession) -> wire.Reply:
        host.settle()
        key = SessionKey(command.tenant, command.session_id)
        session = host.manager.book.sessions.get(key)
        if session is None:
            return wire.success(None, found=False)
        return wire.success(self._describe(host, session))

    def _list_sessions(self, host: SamHost, command: wire.ListSessions) -> wire.Reply:
        host.settle()
        keys = sorted(
            session.key.session_id
            for session in host.manager.book.sessions
            if session.key.tenant == command.tenant
        )
        if command.cursor is not None:
            keys = [key for key in keys if key > command.cursor]
        page = keys[: command.limit]
        sessions = []
        for session_id in page:
            key = SessionKey(command.tenant, session_id)
            session = host.manager.book.sessions.get(key)
            assert session is not None
            sessions.append(self._describe(host, session))
        more = len(keys) > len(page)
        return wire.success(
            {"sessions": sessions, "cursor": page[-1] if more else None}
        )

    def _get_operation(self, host: SamHost, command: wire.GetOperation) -> wire.Reply:
        known = host.manager.edits.operations.get(command.operation_id)
        if known is None or known[0].tenant != command.tenant:
            return wire.success(None, found=False)
        key, result = known
        return wire.success({"session_id": key.session_id, **result_to_wire(result)})

    # --- descriptions -----------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Every account, for operators and for the leak check of the tests."""
        assert self._host is not None
        stats = dataclasses.asdict(self._host.manager.stats())
        stats["invalid_hints"] = self._host.num_invalid_hints
        stats["internal_errors"] = self._num_internal_errors
        stats["waiters"] = len(self._waiters)
        stats["total_blocks"] = self._host.pool.num_blocks
        stats["free_blocks"] = self._host.pool.num_free_blocks
        if self._tier is not None:
            stats |= self._tier.stats()
        return stats

    def _describe(self, host: SamHost, session: Session) -> dict[str, Any]:
        book, key = host.manager.book, session.key
        contexts = [self._describe_context(host, c) for c in session.contexts]
        leases = [c["lease_s"] for c in contexts if c["lease_s"] is not None]
        resumes = [c["expected_resume_s"] for c in contexts]
        parent = book.tree.parent(key)
        operations = host.manager.edits.operations.open_of(key)
        held = sum(context["resident_blocks"] for context in contexts)
        return {
            "session_id": key.session_id,
            "parent": None if parent is None else parent.session_id,
            "children": [child.session_id for child in book.tree.children(key)],
            "contexts": contexts,
            "blocks": {
                "gpu": held,
                "host": self._num_in_tier(key),
                "store": 0 if self._tier is None else self._tier.num_in_store(key),
            },
            "lease_s": max(leases, default=None),
            "expected_resume_s": min(
                (resume_s for resume_s in resumes if resume_s is not None), default=None
            ),
            "running_requests": session.num_active,
            "operations": [result_to_wire(result) for result in operations],
        }

    def _num_in_tier(self, key: SessionKey) -> int:
        if self._tier is None:
            return 0
        return self._tier.query_residency(key, ()).num_blocks

    def _describe_context(self, host: SamHost, context: Context) -> dict[str, Any]:
        index = host.manager.book.index
        return {
            "num_blocks": context.num_blocks,
            "resident_blocks": sum(
                index.num_resident(context, group_id) for group_id in context.leaves
            ),
            "num_tokens": context.num_blocks * host.chains.primary_block_size,
            "lease_s": _seconds_left(context.deadline, host.now()),
            "expected_resume_s": _seconds_left(context.resume_at, host.now()),
        }

    def _current(self, result: EditResult) -> EditResult:
        assert self._host is not None
        if result.operation_id is None:
            return result
        known = self._host.manager.edits.operations.get(result.operation_id)
        if known is None and _is_open(result):
            # There were too many since: whoever waits is not kept waiting.
            reason = "the operation is not remembered any more"
            return dataclasses.replace(
                result, status=EditStatus.REJECTED, reason=reason
            )
        return result if known is None else known[1]


def _seconds_left(moment: float, now: float) -> float | None:
    """Seconds until a moment, ``None`` if there is none (0)."""
    return round(max(0.0, moment - now), 3) if moment else None


def _is_open(result: EditResult) -> bool:
    return result.status is EditStatus.ACCEPTED


def _rejected(edit: Edit, reason: str) -> EditResult:
    return EditResult(type=edit.type, status=EditStatus.REJECTED, reason=reason)


def _resolve(answer: Future[str], reply: str) -> None:
    if not answer.done():
        answer.set_result(reply)
