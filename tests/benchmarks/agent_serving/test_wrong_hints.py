from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.agent_serving.scenario import scenario
from benchmarks.agent_serving.wrong_hints import (
    LEASES_S,
    ONE_IN,
    WrongPolicy,
    wrong_sessions,
)
from benchmarks.demo.policy import AgentPolicy, ControlCall
from benchmarks.demo.workload import Next, Turn
from sam_connector.protocol.agent_hint import parse_edits, parse_ttl

TURNS = scenario().workload.turns
SEEDS = range(5)


def edit_of(call: ControlCall) -> str:
    """What an edit does, or ``lease``."""
    assert call.body is not None
    if call.path.endswith("/lease"):
        assert parse_ttl(call.body["ttl"]) in LEASES_S
        return "lease"
    (edit,) = parse_edits(call.body["edits"])
    return edit.type.value


def session_of(call: ControlCall) -> str:
    return call.path.split("/")[4].partition(":")[2].replace(":", "/")


def said(policy: AgentPolicy) -> list[tuple[Turn, tuple[ControlCall, ...]]]:
    """All that is said after the answers, in the order of the trace."""
    return [(turn, policy.after_turn(turn)) for turn in TURNS]


@pytest.mark.parametrize("seed", SEEDS)
def test_one_session_in_five_is_wrong_and_has_about_a_fifth_of_the_turns(
    seed: int,
) -> None:
    sessions = {turn.session for turn in TURNS}
    wrong = wrong_sessions(TURNS, seed)
    assert wrong < sessions
    assert len(wrong) == round(len(sessions) / ONE_IN)
    share = sum(turn.session in wrong for turn in TURNS) / len(TURNS)
    assert 0.1 < share < 0.35


@pytest.mark.parametrize(
    ("num_rows", "num_sessions", "num_wrong"), [(1, 1, 1), (60, 7, 1), (200, 14, 3)]
)
def test_the_share_is_rounded(num_rows: int, num_sessions: int, num_wrong: int) -> None:
    turns = scenario(num_rows).workload.turns
    assert len({turn.session for turn in turns}) == num_sessions
    assert len(wrong_sessions(turns, 0)) == num_wrong


def test_who_is_wrong_depends_on_the_seed_alone() -> None:
    assert wrong_sessions(TURNS, 3) == wrong_sessions(TURNS, 3)
    assert len({wrong_sessions(TURNS, seed) for seed in range(20)}) > 5


@pytest.mark.parametrize("seed", SEEDS)
def test_the_others_are_treated_as_without_any_wrong_one(seed: int) -> None:
    right = AgentPolicy(TURNS, "r")
    policy = WrongPolicy(TURNS, "r", seed=seed)
    wrong = wrong_sessions(TURNS, seed)
    for turn, calls in said(policy):
        if turn.session not in wrong:
            assert calls == right.after_turn(turn)
            assert policy.before_turn(turn) == right.before_turn(turn)
            assert policy.hint(turn) == right.hint(turn)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wrong_session_makes_every_kind_of_mistake(seed: int) -> None:
    wrong = wrong_sessions(TURNS, seed)
    kinds: Counter[str] = Counter()
    for turn, calls in said(WrongPolicy(TURNS, "r", seed=seed)):
        if turn.session in wrong and turn.next is not Next.SIDE_CALL:
            (call,) = calls
            kinds[edit_of(call)] += 1
    assert set(kinds) == {"lease", "evict", "prefetch"}


@pytest.mark.parametrize("seed", SEEDS)
def test_it_evicts_itself_while_it_goes_on_and_prefetches_the_dead(seed: int) -> None:
    wrong = wrong_sessions(TURNS, seed)
    ended: set[str] = set()
    for turn, calls in said(WrongPolicy(TURNS, "r", seed=seed)):
        if turn.next is Next.END:
            ended.add(turn.session)
        if turn.session not in wrong:
            continue
        for call in calls:
            if edit_of(call) == "prefetch":
                assert session_of(call) in (ended & wrong or ended)
            else:
                assert session_of(call) == turn.session
            if edit_of(call) == "evict":
                assert turn.next is not Next.END


def test_it_asks_for_leases_of_any_length_and_is_never_brought_back() -> None:
    policy = WrongPolicy(TURNS, "r", seed=0)
    wrong = wrong_sessions(TURNS, 0)
    mine = [turn for turn in TURNS if turn.session in wrong]
    hints = [policy.hint(turn) for turn in mine if turn.next is not Next.SIDE_CALL]
    asked = {hint["cache_control"]["ttl"] for hint in hints if hint}  # type: ignore[index]
    assert len(asked) > 2
    assert asked <= set(LEASES_S)
    assert all(policy.before_turn(turn) == () for turn in mine)


def test_every_pass_is_told_the_same() -> None:
    one, two = (WrongPolicy(TURNS, "r", seed=1) for _ in range(2))
    assert said(one) == said(two)
    assert said(one) != said(WrongPolicy(TURNS, "r", seed=2))


def test_a_one_off_call_of_a_wrong_session_names_nobody() -> None:
    turn = next(turn for turn in TURNS if turn.next is Next.SIDE_CALL)
    seed = next(s for s in range(99) if turn.session in wrong_sessions(TURNS, s))
    policy = WrongPolicy(TURNS, "r", seed=seed)
    assert policy.hint(turn) is None
    assert policy.after_turn(turn) == ()
