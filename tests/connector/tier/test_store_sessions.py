"""Sessions in a store: who is told what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sam_connector.connector.tier.store_sessions import StoreSessions
from sam_connector.connector.tier.values import ValueShape
from sam_connector.core.clock import MonotonicClock
from sam_connector.core.tiers import ContextBlocks
from sam_connector.core.types import SessionKey
from tests.pooling.bench import eventually, session
from tests.pooling.pools import GROUP, Pool, block_hash, numbered

S = session("s")


class Directory:
    """One context for every list of numbers in ``contexts``."""

    def __init__(self) -> None:
        self.contexts: list[list[int]] = [[1]]

    def contexts_of(self, key: SessionKey) -> list[ContextBlocks]:
        return [
            ContextBlocks(block_hashes={GROUP: list(map(block_hash, numbers))})
            for numbers in self.contexts
        ]

    def parent_of(self, key: SessionKey) -> None:
        return None


def make(pool: Pool, size: int = 1) -> tuple[StoreSessions, Directory]:
    directory = Directory()
    state: Any = SimpleNamespace(directory=directory, clock=MonotonicClock())
    shape = ValueShape({GROUP: size}, {GROUP: 1})
    return StoreSessions(state, pool.spm, shape), directory


def heard(pool: Pool, sessions: StoreSessions) -> None:
    eventually(lambda: not pool.spm.num_open)
    sessions.hear()


def test_one_manifest_s_answer_is_not_another_s() -> None:
    """A turn between a manifest's being written and that being heard of."""
    told: dict[str, str | None] = {}
    with Pool() as pool:
        sessions, directory = make(pool)
        sessions.announce(S, lambda reason: told.setdefault("first", reason))
        eventually(lambda: pool.spm.has_events)
        pool.manifests.is_down = True
        pool.manifests.gate.clear()
        directory.contexts = [[1, 2]]
        sessions.announce(S, lambda reason: told.setdefault("second", reason))
        sessions.hear()
        assert told == {"first": None}

        pool.open_gates()
        heard(pool, sessions)
        assert told == {"first": None, "second": "no answer"}


def test_turns_that_are_published_together_are_all_told() -> None:
    told: list[str | None] = []
    with Pool() as pool:
        sessions, _ = make(pool)
        pool.manifests.gate.clear()
        for _ in range(3):
            sessions.announce(S, told.append)
        pool.open_gates()
        heard(pool, sessions)
        assert told == [None] * 3


def test_the_last_value_of_a_sequence_that_has_grown_is_given_up() -> None:
    with Pool() as pool:
        sessions, directory = make(pool, size=4)
        for num_blocks in range(1, 11):
            directory.contexts = [list(range(num_blocks)), [0, 1, 2, 3, 99]]
            last = [num_blocks - 1] if num_blocks % 4 else []
            pool.spm.track(S, numbered(*range(3, num_blocks, 4), *last, 99))
            sessions.announce(S, lambda reason: None)
            assert sessions.num_blocks_of(S) == num_blocks + 1
        assert set(pool.spm.chunks_of(S)) == set(numbered(3, 7, 9, 99))
