from __future__ import annotations

from typing import get_args

import pytest

from sam_connector.pooling.events import Ended, PoolEvent, Published, Recalled
from tests.pooling.bench import session


def test_good_news_needs_no_reason() -> None:
    assert Published(session("s")).reason is None
    assert Ended(1).reason is None


def test_neither_manifest_nor_reason_means_that_there_is_none() -> None:
    nothing = Recalled(1)

    assert nothing.manifest is None
    assert nothing.reason is None


@pytest.mark.parametrize("kind", get_args(PoolEvent))
def test_every_kind_of_event_is_a_fact(kind: type) -> None:
    event = kind(1)

    with pytest.raises(AttributeError):
        event.reason = "changed"
