"""Who is told what came of a manifest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sam_connector.connector.tier.store_sessions import StoreSessions
from sam_connector.core.clock import MonotonicClock
from sam_connector.core.tiers import ContextBlocks
from sam_connector.core.types import BlockHash, SessionKey
from tests.pooling.bench import eventually, session
from tests.pooling.pools import GROUP, Pool, block_hash

pytestmark = pytest.mark.vllm

S = session("s")


class Directory:
    """One session with one context, whose blocks are these."""

    numbers = (1,)

    def contexts_of(self, session: SessionKey) -> list[ContextBlocks]:
        hashes = [BlockHash(block_hash(number)) for number in self.numbers]
        return [ContextBlocks(block_hashes={GROUP: hashes}, context_id=1)]

    def parent_of(self, session: SessionKey) -> None:
        return None


def sessions_on(pool: Pool, directory: Directory) -> StoreSessions:
    state: Any = SimpleNamespace(directory=directory, clock=MonotonicClock())
    shape: Any = SimpleNamespace()
    return StoreSessions(state, pool.spm, shape)


def test_a_later_turn_is_not_told_what_came_of_an_earlier_one() -> None:
    told: dict[str, str | None] = {}
    directory = Directory()
    with Pool() as pool:
        sessions = sessions_on(pool, directory)
        sessions.announce(S, lambda reason: told.setdefault("first", reason))
        eventually(lambda: pool.spm.has_events)  # written, and not heard of
        pool.manifests.is_down = True
        directory.numbers = (1, 2)
        sessions.announce(S, lambda reason: told.setdefault("second", reason))
        sessions.hear()
        assert told == {"first": None}
        eventually(lambda: not pool.spm.num_open)
        sessions.hear()
        assert told["second"] is not None


def test_one_manifest_answers_all_that_came_before_it_was_written() -> None:
    told: list[str | None] = []
    directory = Directory()
    with Pool() as pool:
        sessions = sessions_on(pool, directory)
        for numbers in ((1,), (1, 2), (1, 2, 3)):
            directory.numbers = numbers
            sessions.announce(S, told.append)
        eventually(lambda: not pool.spm.num_open)
        sessions.hear()
        assert told == [None] * 3
