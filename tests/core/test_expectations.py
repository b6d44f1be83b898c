from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sam_connector.core.expectations import Expectations

CHANGES = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0])),
    max_size=60,
)


@given(changes=CHANGES)
def test_the_earliest_moment_is_known_whatever_changes(
    changes: list[tuple[int, float]],
) -> None:
    expectations, known = Expectations(), dict[int, float]()
    for holder, moment in changes:
        expectations.set(holder, moment)
        known[holder] = moment
        known = {other: at for other, at in known.items() if at}
        assert expectations.earliest == min(known.values(), default=0.0)
        assert expectations.moments == known
        assert len(expectations) == len(known)


@given(changes=CHANGES)
def test_a_copy_goes_its_own_way(changes: list[tuple[int, float]]) -> None:
    original = Expectations({9: 2.5})
    copy = original.copy()
    for holder, moment in changes:
        copy.set(holder, moment)
    assert original.moments == {9: 2.5}
    assert original.earliest == 2.5


def test_what_has_changed_a_thousand_times_is_no_larger_for_it() -> None:
    expectations = Expectations(dict.fromkeys(range(10), 1.0))
    for turn in range(1_000):
        expectations.set(turn % 10, 2.0 + turn)
    assert len(expectations._heap) <= 2 * 10 + 8


def test_holders_of_the_same_moment_need_not_be_comparable() -> None:
    first, second = object(), object()
    expectations = Expectations({first: 1.0, second: 1.0})
    expectations.set(first, 0.0)
    assert expectations.earliest == 1.0
    assert expectations.moments == {second: 1.0}
