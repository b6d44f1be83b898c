from __future__ import annotations

import pytest

from benchmarks.agent_serving.__main__ import ROWS, arms, main
from benchmarks.agent_serving.wrong_hints import WrongPolicy, wrong_sessions
from benchmarks.demo.policy import AgentPolicy
from benchmarks.demo.report import table
from benchmarks.demo.server import ServerKind
from tests.benchmarks.agent_serving.numbers import ARMS, WORKLOAD
from tests.benchmarks.demo.numbers import pool


def test_four_servers_of_which_two_are_told_anything() -> None:
    driven = arms(seed=3)
    assert tuple(driven) == ARMS
    assert driven[ServerKind.STOCK] is None
    assert driven[ServerKind.TIER] is None
    assert driven[ServerKind.HINTS] is AgentPolicy
    make_wrong = driven[ServerKind.WRONG]
    assert make_wrong is not None
    policy = make_wrong(WORKLOAD.turns, "r")
    assert isinstance(policy, WrongPolicy)
    (wrong,) = wrong_sessions(WORKLOAD.turns, 3)
    told = {
        turn.session
        for turn in WORKLOAD.turns
        if policy.after_turn(turn) != AgentPolicy(WORKLOAD.turns, "r").after_turn(turn)
    }
    assert told == {wrong}


def test_the_table_shows_what_the_demos_does_not() -> None:
    lines = table({"": pool(label="")}, ROWS).splitlines()
    assert lines[0] == "|  | stock | tier | hints |"
    titles = [line.split("|")[1].strip() for line in lines[2:]]
    assert {"time per request (s)", "tokens per second"} <= set(titles)


@pytest.mark.parametrize("option", ["--rows=59", "--repeats=0", "--rows=x"])
def test_too_little_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([option])
    assert "must be a number from" in capsys.readouterr().err
