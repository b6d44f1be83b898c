"""The manager under everything at once: no model, only what must always hold.

Limits are tiny, time moves without steps, content is lost behind the manager's
back, two KV cache groups, a tier that answers late. In shadow mode a stock engine
runs beside it and must hand out the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sam_connector.core.limits import Limits
from sam_connector.core.types import Edit, EditStatus, EditType, GroupId
from tests.core.builders import Engine, FakeTier, key

pytestmark = pytest.mark.timeout(120)

SESSIONS = st.sampled_from("STUV")
RANGES = st.sampled_from([(None, None), (None, None), (0, 2), (1, 3), (2, 9), (0, 1)])
EDITS = st.builds(
    lambda edit_type, span: Edit(
        type=edit_type, block_start=span[0], block_end=span[1]
    ),
    st.sampled_from([EditType.EVICT, EditType.EVICT, EditType.OFFLOAD]),
    RANGES,
)
#: Session, how much of its last text is kept and what is added, TTL, protected
#: blocks, parent, edits.
Asked = tuple[str | None, int, str, float | None, int | None, str | None, list[Edit]]
REQUESTS = st.tuples(
    st.one_of(SESSIONS, SESSIONS, st.none()),
    st.sampled_from([99, 99, 99, 0, 2, 4, 5]),
    st.text("ab", max_size=4),
    st.sampled_from([None, None, 0, 0.5, 3, 20, 9999]),
    st.sampled_from([None, 0, 2]),
    st.one_of(st.none(), SESSIONS),
    st.one_of(st.just([]), st.just([]), st.lists(EDITS, max_size=1)),
)
LIMITS = Limits(
    max_sessions=3,
    max_contexts=2,
    max_records=40,
    max_tree_depth=3,
    max_operations=3,
    max_ttl_s=50.0,
    idle_ttl_s=7.0,
    max_protected_fraction=0.3,
    max_expiries_per_step=1,
)


class ChaosMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([20, 40]),
        enforce=st.booleans(),
        groups=st.sampled_from([(0,), (0, 1)]),
    )
    def build(self, num_blocks: int, enforce: bool, groups: tuple[int, ...]) -> None:
        self.tier = FakeTier(EditType.OFFLOAD, EditType.EVICT)
        group_ids = tuple(map(GroupId, groups))
        self.engine = Engine(
            num_blocks=num_blocks,
            limits=LIMITS,
            groups=group_ids,
            ranges=True,
            enforce=enforce,
            tiers=[self.tier],
        )
        self.engines = [self.engine]
        if not enforce:
            self.engines.append(
                Engine(num_blocks=num_blocks, groups=group_ids, managed=False)
            )
        self.waiting: dict[str, str] = {}
        self.last_text: dict[str | None, str] = {}

    def everywhere(self, operate: Callable[[Engine], Any]) -> Any:
        first, *_ = [operate(engine) for engine in self.engines]
        return first

    def has_room(self, num_blocks: int) -> bool:
        pool, groups = self.engine.pool, self.engine.groups
        return num_blocks * len(groups) <= pool.num_free_blocks

    # --- requests ------------------------------------------------------------

    @rule(request=REQUESTS, generated=st.text("ab", max_size=2), aborted=st.booleans())
    def turn(self, request: Asked, generated: str, aborted: bool) -> None:
        request_id = self.begin_request(request)
        if request_id is not None:
            self.generate(request_id, generated)
            self.finish(request_id, aborted, None)

    @rule(request=REQUESTS)
    def begin(self, request: Asked) -> None:
        self.begin_request(request)

    @precondition(lambda self: self.engine.runs or self.waiting)
    @rule(
        data=st.data(),
        event=st.sampled_from(["finish", "finish", "admit", "generate", "preempt"]),
        aborted=st.booleans(),
        number=st.sampled_from([None, None, 0, 2]),
    )
    def go_on(
        self, data: st.DataObject, event: str, aborted: bool, number: int | None
    ) -> None:
        requests = sorted({*self.engine.runs, *self.waiting})
        request_id = data.draw(st.sampled_from(requests))
        if event == "finish":
            self.finish(request_id, aborted, number)
        elif event == "admit" and request_id in self.waiting:
            self.admit(request_id, number)
        elif event == "generate":
            self.generate(request_id, "ab")
        elif event == "preempt" and request_id in self.engine.running:
            self.waiting[request_id] = self.engine.runs[request_id].text
            self.everywhere(lambda engine: engine.preempt(request_id))

    def begin_request(self, request: Asked) -> str | None:
        if len(self.waiting) + len(self.engine.running) >= 5:
            return None
        session, kept, added, ttl, protect, parent, edits = request
        text = ((self.last_text.get(session, "")[:kept] + added) or "a")[:9]
        self.last_text[session] = text
        request_id: str = self.everywhere(
            lambda engine: engine.add(
                session, ttl=ttl, protect=protect, parent=parent, edits=edits
            )
        )
        self.waiting[request_id] = text
        self.admit(request_id, None)
        return request_id

    def admit(self, request_id: str, num_blocks: int | None) -> None:
        text = self.waiting[request_id]
        if self.has_room(len(text)):
            del self.waiting[request_id]
            self.everywhere(lambda engine: engine.admit(request_id, text, num_blocks))

    def generate(self, request_id: str, text: str) -> None:
        if request_id in self.engine.running:
            run = self.engine.runs[request_id]
            missing = len(run.text) + len(text) - len(run.blocks[self.engine.groups[0]])
            if len(run.text) < 11 and self.has_room(missing):
                self.everywhere(lambda engine: engine.generate(request_id, text))

    def finish(self, request_id: str, aborted: bool, num_computed: int | None) -> None:
        self.waiting.pop(request_id, None)
        self.everywhere(
            lambda engine: engine.finish(
                request_id, aborted=aborted, num_computed=num_computed
            )
        )

    # --- control -------------------------------------------------------------

    @rule(
        session=SESSIONS,
        what=st.sampled_from(["lease", "lease", "edit", "edit", "free"]),
        ttl=st.sampled_from([-1, 0, 2, 40, 1e18]),
        edits=st.lists(EDITS, min_size=1, max_size=2),
        tree=st.booleans(),
    )
    def control(
        self, session: str, what: str, ttl: float, edits: list[Edit], tree: bool
    ) -> None:
        if what == "lease":
            self.engine.manager.set_lease(key(session), ttl, self.engine.now)
        elif what == "edit":
            results = self.engine.edit(session, *edits)
            assert [result.type for result in results] == [e.type for e in edits]
        else:
            self.engine.manager.free_session(key(session), tree=tree)

    @precondition(lambda self: self.tier.operation_ids)
    @rule(
        data=st.data(),
        status=st.sampled_from([EditStatus.COMPLETED, EditStatus.PARTIAL]),
    )
    def operation_ends(self, data: st.DataObject, status: EditStatus) -> None:
        operation_id = data.draw(st.sampled_from(self.tier.operation_ids))
        self.tier.finish(operation_id, status)

    # --- the engine ----------------------------------------------------------

    @rule(
        seconds=st.sampled_from([0, 0.25, 1, 3.7, 30]),
        stepping=st.sampled_from([True, True, False]),
    )
    def time_passes(self, seconds: float, stepping: bool) -> None:
        if stepping:
            self.engine.step(seconds)
        else:
            self.engine.now += seconds

    @rule(num_blocks=st.integers(1, 14))
    def pressure(self, num_blocks: int) -> None:
        num_blocks = min(num_blocks, self.engine.pool.num_free_blocks)
        self.everywhere(lambda engine: engine.pool.free_blocks(engine.fill(num_blocks)))

    @rule(block_id=st.integers(1, 19))
    def content_is_lost(self, block_id: int) -> None:
        self.everywhere(
            lambda engine: engine.pool.uncache(engine.pool.blocks[block_id])
        )

    @rule(really=st.sampled_from([False] * 5 + [True]))
    def reset(self, really: bool) -> None:
        if really and not self.engine.running:
            assert self.everywhere(lambda engine: engine.reset())

    # --- after every step ----------------------------------------------------

    @invariant()
    def consistent(self) -> None:
        self.engine.check_integrity()
        edits = self.engine.manager.edits
        assert len(edits.operations) <= LIMITS.max_operations
        orders = [engine.pool.free_order() for engine in self.engines]
        assert orders == orders[:1] * len(orders), "shadow mode changed the order"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for request_id in {*self.engine.runs, *self.waiting}:
            self.finish(request_id, aborted=True, num_computed=None)
        for operation_id in self.tier.operation_ids:
            self.tier.finish(operation_id, EditStatus.REJECTED)
        for _ in range(6):
            self.engine.step(100)
            self.engine.settle()
        self.engine.assert_nothing_left()


TestChaosMachine = ChaosMachine.TestCase
TestChaosMachine.settings = settings(max_examples=70, stateful_step_count=40)
