"""The manager under everything at once: no model, only what must always hold.

Limits are tiny, time moves without steps, content is lost behind the manager's
back, two KV cache groups, a tier that answers late. In shadow mode a stock engine
runs beside it and must hand out the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

SESSIONS = st.sampled_from("STUV")
TEXTS = st.text("ab", min_size=1, max_size=6)
TTLS = st.sampled_from([None, None, 0, 0.5, 3, 20, 9999])
RANGES = st.sampled_from([(None, None), (None, None), (0, 2), (1, 3), (2, 9), (0, 1)])
EDITS = st.builds(
    lambda edit_type, span: Edit(
        type=edit_type, block_start=span[0], block_end=span[1]
    ),
    st.sampled_from([EditType.EVICT, EditType.EVICT, EditType.OFFLOAD]),
    RANGES,
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

    def everywhere(self, operate: Callable[[Engine], Any]) -> Any:
        return [operate(engine) for engine in self.engines][0]

    def has_room(self, num_blocks: int) -> bool:
        pool, groups = self.engine.pool, self.engine.groups
        return num_blocks * len(groups) <= pool.num_free_blocks

    # --- requests ---------------------------------------------------------------------

    @rule(
        session=st.one_of(SESSIONS, st.none()),
        text=TEXTS,
        ttl=TTLS,
        protect=st.sampled_from([None, 0, 2]),
        parent=st.one_of(st.none(), SESSIONS),
        edits=st.lists(EDITS, max_size=1),
    )
    def add(
        self,
        session: str | None,
        text: str,
        ttl: float | None,
        protect: int | None,
        parent: str | None,
        edits: list[Edit],
    ) -> None:
        if len(self.waiting) + len(self.engine.runs) < 5:
            request_id = self.everywhere(
                lambda engine: engine.add(
                    session, ttl=ttl, protect=protect, parent=parent, edits=edits
                )
            )
            self.waiting[request_id] = text

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), num_blocks=st.sampled_from([99, 2]))
    def admit(self, data: st.DataObject, num_blocks: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        text = self.waiting[request_id]
        if self.has_room(len(text)):
            del self.waiting[request_id]
            self.everywhere(lambda engine: engine.admit(request_id, text, num_blocks))

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), text=st.text("ab", max_size=2))
    def generate(self, data: st.DataObject, text: str) -> None:
        request_id = data.draw(st.sampled_from(self.engine.running))
        run = self.engine.runs[request_id]
        missing = len(run.text) + len(text) - len(run.blocks[self.engine.groups[0]])
        if len(run.text) < 9 and self.has_room(missing):
            self.everywhere(lambda engine: engine.generate(request_id, text))

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.engine.running))
        self.waiting[request_id] = self.engine.runs[request_id].text
        self.everywhere(lambda engine: engine.preempt(request_id))

    @precondition(lambda self: self.engine.runs or self.waiting)
    @rule(
        data=st.data(),
        aborted=st.booleans(),
        num_computed=st.sampled_from([None, None, 0, 2]),
    )
    def finish(
        self, data: st.DataObject, aborted: bool, num_computed: int | None
    ) -> None:
        running = sorted({*self.engine.runs, *self.waiting})
        request_id = data.draw(st.sampled_from(running))
        self.waiting.pop(request_id, None)
        self.everywhere(
            lambda engine: engine.finish(
                request_id, aborted=aborted, num_computed=num_computed
            )
        )

    # --- control ----------------------------------------------------------------------

    @rule(session=SESSIONS, edits=st.lists(EDITS, max_size=2))
    def edit(self, session: str, edits: list[Edit]) -> None:
        results = self.engine.edit(session, *edits)
        assert [result.type for result in results] == [edit.type for edit in edits]

    @precondition(lambda self: self.tier.operation_ids)
    @rule(
        data=st.data(),
        status=st.sampled_from([EditStatus.COMPLETED, EditStatus.PARTIAL]),
    )
    def operation_ends(self, data: st.DataObject, status: EditStatus) -> None:
        operation_id = data.draw(st.sampled_from(self.tier.operation_ids))
        self.tier.finish(operation_id, status)

    @rule(session=SESSIONS, ttl=st.sampled_from([-1, 0, 2, 40, 1e18]))
    def set_lease(self, session: str, ttl: float) -> None:
        self.engine.manager.set_lease(key(session), ttl, self.engine.now)

    @rule(session=SESSIONS, tree=st.booleans())
    def free_session(self, session: str, tree: bool) -> None:
        self.engine.manager.free_session(key(session), tree=tree)

    # --- the engine -------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0, 0, 0.25, 1, 3.7, 30]))
    def step(self, seconds: float) -> None:
        self.engine.step(seconds)

    @rule(seconds=st.sampled_from([0.25, 1, 3.7, 30]))
    def time_passes(self, seconds: float) -> None:
        self.engine.now += seconds

    @rule(num_blocks=st.integers(1, 12))
    def pressure(self, num_blocks: int) -> None:
        num_blocks = min(num_blocks, self.engine.pool.num_free_blocks)
        self.everywhere(
            lambda engine: engine.pool.free_blocks(engine.fill(num_blocks))
        )

    @rule(block_id=st.integers(1, 19))
    def content_is_lost(self, block_id: int) -> None:
        self.everywhere(lambda engine: engine.pool.uncache(engine.pool.blocks[block_id]))

    @rule()
    def reset(self) -> None:
        if not self.engine.running:
            assert self.everywhere(lambda engine: engine.reset())

    # --- after every step -------------------------------------------------------------

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
            self.everywhere(lambda engine: engine.finish(request_id, aborted=True))
        for _ in range(6):
            self.engine.step(100)
            self.engine.settle()
        self.engine.assert_nothing_left()


TestChaosMachine = ChaosMachine.TestCase
TestChaosMachine.settings = settings(max_examples=100, stateful_step_count=40)
