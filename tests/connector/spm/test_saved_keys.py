"""What the inner connector has saved, and for whom."""

from __future__ import annotations

import pytest

from sam_connector.connector.spm.saved_keys import SavedKeys
from sam_connector.core.types import GroupId
from tests.connector.spm.test_sequences import key, sequence

ABC = sequence(1, 2, 3)


@pytest.mark.parametrize(("whole", "num_keys"), [(True, 1), (False, 2)])
def test_keys_are_those_of_the_inner_connector(whole: bool, num_keys: int) -> None:
    keys = SavedKeys(whole_sequences=whole)
    keys.add_saved(ABC.hashes[:2])
    keys.claim(key("s"), ABC)
    assert keys.tracker.num_chunks_of(key("s")) == num_keys
    assert keys.num_saved(ABC, 3) == 2
    assert keys.num_saved(ABC, 1) == (0 if whole else 1)


def test_keys_are_shared_and_orphaned() -> None:
    keys = SavedKeys(whole_sequences=False)
    keys.add_saved(ABC.hashes[:2])
    keys.claim(key("a"), ABC)
    keys.claim(key("b"), sequence(1, 9))
    assert keys.tracker.num_shared == 1
    orphans = keys.tracker.remove(key("a"))
    assert orphans == [(GroupId(0), ABC.hashes[1])]
    keys.tracker.check_integrity()


def test_what_turned_out_not_to_be_there_is_dropped() -> None:
    keys = SavedKeys(whole_sequences=True)
    keys.add_saved(ABC.hashes)
    keys.claim(key("s"), ABC)
    keys.drop(ABC.hashes[-1:])
    assert keys.num_saved(ABC, 3) == 0
    assert keys.tracker.num_chunks_of(key("s")) == 0


def test_keys_that_nobody_claims_are_bounded() -> None:
    keys = SavedKeys(whole_sequences=True, max_unclaimed=1)
    keys.add_saved(ABC.hashes)
    other = sequence(7)
    keys.add_saved(other.hashes)
    assert keys.num_saved(ABC, 3) == 0
    assert keys.num_saved(other, 1) == 1
