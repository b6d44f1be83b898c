"""A naive model of the manager: no indexes, no segments, no background work.

Every context is a string and every question is answered by looking at all of them.
It covers whole contexts and ranges, one KV cache group, and time that moves in
whole seconds with the manager stepping at each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from sam_connector.core.limits import Limits
from tests.core.pool import FakePool

Key = str


@dataclass(eq=False)
class ModelContext:
    """What a session's context is, and what of it is held until when."""

    session: ModelSession
    text: str = ""
    #: Deadline by block; blocks that are not in here are not held.
    held: dict[int, float] = field(default_factory=dict)
    deadline: float = 0.0
    #: When it is expected back, 0 if nobody has said.
    resume_at: float = 0.0
    protect: int | None = None
    #: When it is forgotten: its deadline, or the end of its idle time.
    timer: float = 0.0
    newest: int = 0
    running: int = 0

    def leased(self, index: int) -> float:
        covered = self.protect is None or index < self.protect
        return self.deadline if covered else 0.0

    def release_from(self, start: int) -> None:
        """Gives up what follows, and what was only remembered before that."""
        self.held = {i: d for i, d in self.held.items() if i < start}
        self.text = self.text[: max(self.held, default=-1) + 1]


@dataclass(eq=False)
class ModelSession:
    key: Key
    contexts: list[ModelContext] = field(default_factory=list)
    running: int = 0
    epoch: int = 0


@dataclass(eq=False)
class ModelRequest:
    session: ModelSession
    sequence: int
    epoch: int
    ttl: float | None
    protect: int | None
    resume: float | None
    context: ModelContext | None = None
    replaced: ModelContext | None = None


class Model:
    """What the manager must know; method names follow its own.

    Args:
        limits: bounds; those on sessions and records must not be reached.
        pool: to see which block holds what.
        ranges: whether ranges have an effect.
        copies: the resident copies the manager has; asked only which of several
            blocks it took where the protected share has no room for all.
    """

    def __init__(
        self,
        limits: Limits,
        pool: FakePool,
        *,
        ranges: bool,
        copies: Callable[[], Mapping[str, int]],
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.ranges = ranges
        self.copies = copies
        self.max_protected = int(len(pool.blocks) * limits.max_protected_fraction)
        self.num_granted = 0
        self.num_refused = 0
        self.sessions: dict[Key, ModelSession] = {}
        self.requests: dict[str, ModelRequest] = {}
        self.num_requests = 0
        #: Block that is the copy of each held content.
        self.resident: dict[str, int] = {}
        #: What those blocks had as their content then, to compare by identity: a
        #: block that was handed out and has equal content again is no copy.
        self.seen: dict[str, object] = {}

    # --- requests ------------------------------------------------------------

    def add(
        self,
        request_id: str,
        key: Key,
        ttl: float | None,
        protect: int | None,
        resume: float | None = None,
    ) -> None:
        self.num_requests += 1
        session = self.sessions.setdefault(key, ModelSession(key))
        session.running += 1
        self.requests[request_id] = ModelRequest(
            session, self.num_requests, session.epoch, ttl, protect, resume
        )

    def assign(
        self, request_id: str, text: str, block_ids: Sequence[int], now: float
    ) -> None:
        request = self.requests[request_id]
        context = self._record(request, text, block_ids, now)
        if context is not None and request.ttl:
            deadline = now + min(request.ttl, self.limits.max_ttl_s)
            if deadline > context.deadline:
                self._lease(context, deadline, request.protect)

    def finish(
        self,
        request_id: str,
        text: str,
        block_ids: Sequence[int],
        now: float,
        *,
        aborted: bool,
    ) -> None:
        """Up to the point where the edits of its hint are applied."""
        request = self.requests[request_id]
        context = self._record(request, text, block_ids, now)
        if context is None:
            return
        self._touch(context, now)
        if aborted:
            return
        old = request.replaced
        if (
            old is not None
            and self._is_live(old)
            and not old.running
            and old.newest < request.sequence
        ):
            if old.deadline and not context.deadline:
                self._grant(context, old.deadline, old.protect)
            self._drop(old)
        self._expect(context, request.resume, now)
        if request.ttl:
            deadline = now + min(request.ttl, self.limits.max_ttl_s)
            self._lease(context, deadline, request.protect)
        elif request.ttl is not None:
            self._end_lease(context, now)

    def forget_request(self, request_id: str, now: float) -> None:
        request = self.requests.pop(request_id)
        request.session.running -= 1
        context = request.context
        if context is not None:
            rests = context.running == 1 and self._is_live(context)
            if (
                rests
                and context.deadline
                and not self._has_room(context, context.protect)
            ):
                self.num_refused += 1
                self._end_lease(context, now)
            context.running -= 1
        self._drop_if_empty(request.session)

    # --- control -------------------------------------------------------------

    def evict(self, key: Key) -> None:
        session = self.sessions.get(key)
        if session is not None:
            session.epoch += 1
            for context in list(session.contexts):
                self._drop(context)
            self._drop_if_empty(session)

    def evict_range(self, key: Key, start: int, end: int) -> bool:
        session = self.sessions.get(key)
        if session is None or not session.contexts or not self.ranges:
            return False
        context = session.contexts[-1]
        if not 0 <= start < end <= len(context.text):
            return False
        context.held = {
            index: deadline
            for index, deadline in context.held.items()
            if not start <= index < end
        }
        return True

    def set_lease(
        self, key: Key, ttl: float, now: float, resume: float | None = None
    ) -> str | None:
        session = self.sessions.get(key)
        if session is None:
            return None
        for context in session.contexts:
            self._expect(context, resume, now)
        if ttl <= 0:
            for context in session.contexts:
                self._end_lease(context, now)
            return "completed"
        deadline = now + min(ttl, self.limits.max_ttl_s)
        leased = [self._lease(c, deadline, c.protect) for c in session.contexts]
        if all(leased):
            return "completed"
        return "partial" if any(leased) else "rejected"

    def free_session(self, key: Key) -> None:
        session = self.sessions.pop(key, None)
        if session is not None:
            session.epoch += 1
            session.contexts.clear()

    def advance(self, now: float) -> None:
        for session in list(self.sessions.values()):
            for context in list(session.contexts):
                if context.resume_at <= now:
                    context.resume_at = 0.0
                if context.timer > now:
                    continue
                if context.running or context.deadline:
                    self._end_lease(context, now)
                else:
                    self._drop(context)
            self._drop_if_empty(session)

    def reset(self) -> None:
        for session in list(self.sessions.values()):
            session.contexts.clear()
            self._drop_if_empty(session)

    # --- answers -------------------------------------------------------------

    def contexts(self) -> list[ModelContext]:
        return [c for session in self.sessions.values() for c in session.contexts]

    def holds(self) -> dict[str, tuple[int, float]]:
        """(``session_ref_cnt``, ``ttl_expire_at``) of every content held."""
        holders: dict[str, list[ModelContext]] = {}
        for context in self.contexts():
            for index in context.held:
                holders.setdefault(context.text[: index + 1], []).append(context)
        return {
            content: (
                len({context.session.key for context in contexts}),
                max(context.held[len(content) - 1] for context in contexts),
            )
            for content, contexts in holders.items()
        }

    def due(self, content: str) -> float:
        """When the first of those who hold a content is due back."""
        index = len(content) - 1
        holders = [
            context
            for context in self.contexts()
            if index in context.held and context.text.startswith(content)
        ]
        moments = [context.resume_at for context in holders if context.resume_at]
        end = max(context.held[index] for context in holders)
        if end and len(moments) < len(holders):
            moments.append(end)
        return min(moments, default=0.0)

    def forget_copies(self) -> dict[str, int]:
        """Drops copies that are gone or that nobody holds; returns the rest."""
        holds = self.holds()
        self.resident = {
            content: block_id
            for content, block_id in self.resident.items()
            if content in holds
            and self.pool.blocks[block_id].block_hash is self.seen[content]
        }
        return self.resident

    def protected(self) -> set[str]:
        """Resident content under the lease of a context that no request runs in."""
        return self._leased_at_rest() & self.forget_copies().keys()

    # --- internals -----------------------------------------------------------

    def _leased_at_rest(self) -> set[str]:
        return {
            context.text[: index + 1]
            for context in self.contexts()
            if not context.running
            for index, deadline in context.held.items()
            if deadline
        }

    def _has_room(self, context: ModelContext, protect: int | None) -> bool:
        """Whether the context, or its first ``protect`` blocks, may be protected."""
        protected = self.protected()
        covered = {
            context.text[: index + 1]
            for index in context.held
            if protect is None or index < protect
        }
        protected |= covered & self.resident.keys()
        return len(protected) <= self.max_protected

    def _is_copy(self, content: str, block_id: int) -> bool:
        block_hash = self.pool.blocks[block_id].block_hash
        return block_hash is not None and block_hash[0] == content.encode()

    def _is_live(self, context: ModelContext) -> bool:
        return context in context.session.contexts

    def _may_record(self, request: ModelRequest) -> bool:
        session = request.session
        return (
            self.sessions.get(session.key) is session and session.epoch == request.epoch
        )

    def _record(
        self, request: ModelRequest, text: str, block_ids: Sequence[int], now: float
    ) -> ModelContext | None:
        self.forget_copies()
        has_context = request.context is not None and self._is_live(request.context)
        if not has_context and block_ids and self._may_record(request):
            self._admit(request, text, now)
        context = request.context
        if (
            context is None
            or not self._may_record(request)
            or not self._is_live(context)
            or context.newest != request.sequence
        ):
            return None
        length = min(len(text), max(len(block_ids), len(context.text)))
        context.text = text[:length]
        context.held.update((i, context.leased(i)) for i in range(length))
        self._attach(
            {
                text[: index + 1]: block_id
                for index, block_id in enumerate(block_ids[:length])
                if text[: index + 1] not in self.resident
                and self._is_copy(text[: index + 1], block_id)
            }
        )
        return context

    def _attach(self, found: dict[str, int]) -> None:
        """Takes blocks for the copies of content that has none."""
        at_rest, num_protected = self._leased_at_rest(), len(self.protected())
        if num_protected + len(at_rest & found.keys()) > self.max_protected:
            taken = self.copies()
            found = {
                content: block_id
                for content, block_id in found.items()
                if content not in at_rest or taken.get(content) == block_id
            }
            num_added = len(at_rest & found.keys())
            assert num_protected + num_added <= self.max_protected
        self.resident.update(found)
        for content, block_id in found.items():
            self.seen[content] = self.pool.blocks[block_id].block_hash

    def _admit(self, request: ModelRequest, text: str, now: float) -> None:
        extended: ModelContext | None = None
        replaced: ModelContext | None = None
        for context in request.session.contexts:
            if text.startswith(context.text):
                if extended is None or len(context.text) >= len(extended.text):
                    extended = context
            elif 2 * _common(context.text, text) > len(context.text) and (
                replaced is None
                or _common(context.text, text) >= _common(replaced.text, text)
            ):
                replaced = context
        if extended is not None and (
            replaced is None or len(extended.text) >= _common(replaced.text, text)
        ):
            context, replaced = extended, None
        else:
            opened = self._open(request.session, len(text), now)
            if opened is None:
                return
            context = opened
        if request.context is not None:
            request.context.running -= 1
        request.context, request.replaced = context, replaced
        context.newest = request.sequence
        context.running += 1
        context.resume_at = 0.0
        self._touch(context, now)

    def _open(
        self, session: ModelSession, size: int, now: float
    ) -> ModelContext | None:
        if len(session.contexts) >= self.limits.max_contexts:
            for context in session.contexts:
                expendable = not context.deadline or len(context.text) <= size
                if not context.running and expendable:
                    self._drop(context)
                    break
            else:
                return None
        context = ModelContext(session, timer=now + self.limits.idle_ttl_s)
        session.contexts.append(context)
        return context

    def _expect(self, context: ModelContext, resume: float | None, now: float) -> None:
        if resume is not None:
            context.resume_at = now + min(resume, self.limits.max_ttl_s)

    def _touch(self, context: ModelContext, now: float) -> None:
        contexts = context.session.contexts
        contexts.remove(context)
        contexts.append(context)
        if not context.deadline:
            context.timer = now + self.limits.idle_ttl_s

    def _lease(
        self, context: ModelContext, deadline: float, protect: int | None
    ) -> bool:
        """At rest there must be room for it; while it runs that is left open."""
        protect = protect if self.ranges else None
        granted = bool(context.running) or self._has_room(context, protect)
        if granted:
            self._grant(context, deadline, protect)
        self.num_granted += granted
        self.num_refused += not granted
        return granted

    def _grant(
        self, context: ModelContext, deadline: float, protect: int | None
    ) -> None:
        context.deadline = context.timer = deadline
        context.protect = protect
        self._apply(context)

    def _end_lease(self, context: ModelContext, now: float) -> None:
        context.deadline = 0.0
        context.timer = now + self.limits.idle_ttl_s
        self._apply(context)

    def _apply(self, context: ModelContext) -> None:
        context.held = {index: context.leased(index) for index in context.held}

    def _drop(self, context: ModelContext) -> None:
        context.session.contexts.remove(context)
        self.forget_copies()

    def _drop_if_empty(self, session: ModelSession) -> None:
        known = self.sessions.get(session.key) is session
        if known and not session.contexts and not session.running:
            del self.sessions[session.key]


def _common(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
