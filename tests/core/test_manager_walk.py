"""Long random walks of the machines in ``test_manager_model``.

Hypothesis finds short counterexamples; what takes a hundred steps to build up (a
full pool, a protected share that is used up, broken leases) is reached here.
"""

from __future__ import annotations

from random import Random

import pytest

from tests.core.test_manager_model import ManagerMachine, RangedMachine

pytestmark = pytest.mark.timeout(120)

NUM_STEPS = 250
RESUMES = [None, None, 0, 3, 10, 25, 9999]


def walk(machine: ManagerMachine, random: Random, resumes: Random) -> None:
    """One step at random; what is expected has no say in where the walk goes."""

    def text(max_size: int) -> str:
        return "".join(random.choices("ab", k=random.randint(0, max_size)))

    session, aborted = random.choice("ST"), random.random() < 0.2
    request = (
        session,
        random.choice([99, 99, 99, 0, 2, 4, 5]),
        text(4),
        random.choice([None, None, 0, 5, 20, 20, 9999]),
        random.choice([None, None, 0, 2, 4]),
        random.random() < 0.1,
        resumes.choice(RESUMES),
    )
    step = random.choices(
        ["turn", "begin", "go_on", "control", "steps", "strangers", "reset", "range"],
        [20, 12, 40, 10, 8, 8, 0.5, 5],
    )[0]
    if step == "turn":
        machine.turn(request=request, generated=text(2), aborted=aborted)
    elif step == "begin":
        machine.begin(request=request)
    elif step == "go_on" and machine.model.requests:
        event = random.choice(
            ["finish", "finish", "admit", "allocate", "generate", "preempt"]
        )
        number = random.randint(1, 4)
        machine.go_on(
            which=random.randrange(4), event=event, number=number, aborted=aborted
        )
    elif step == "control":
        what = random.choice(["lease", "lease", "lease", "evict", "free"])
        machine.control(
            session=session,
            what=what,
            ttl=random.choice([0, 2, 15, 40]),
            resume=resumes.choice(RESUMES),
        )
    elif step == "steps":
        machine.steps(seconds=random.choice([1, 1, 2, 4, 10, 35]))
    elif step == "strangers":
        machine.strangers(num_blocks=random.randint(1, 12), text=text(7))
    elif step == "reset":
        machine.preempt_all_and_reset(really=True)
    elif step == "range" and isinstance(machine, RangedMachine):
        machine.give_up_range(
            session=session, start=random.randint(0, 4), size=random.randint(0, 5)
        )


@pytest.mark.parametrize("share", [0.2, 0.4, 1.0])
@pytest.mark.parametrize("num_blocks", [14, 24, 64])
@pytest.mark.parametrize("kind", [ManagerMachine, RangedMachine])
def test_a_long_walk_agrees_with_the_model(
    kind: type[ManagerMachine], num_blocks: int, share: float
) -> None:
    machine = kind()
    machine.build(num_blocks=num_blocks, share=share)
    random = Random(f"{kind.__name__} {num_blocks} {share}")
    resumes = Random(share)
    for _ in range(NUM_STEPS):
        walk(machine, random, resumes)
        machine.contexts_agree()
        machine.blocks_agree()
        machine.zones_agree()
    stats = machine.manager.stats()
    machine.teardown()
    # The walk has been where it was meant to go.
    assert stats.leases_granted > 5
    if num_blocks < 64:
        assert stats.leases_refused > 0 if share < 1.0 else stats.leases_broken > 0
