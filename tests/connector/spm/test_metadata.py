"""Reports of ranks merge in any order, the inner connector's among them."""

from __future__ import annotations

import pytest

from sam_connector.connector.spm.metadata import (
    REQUEST_PREFIX,
    SpmReport,
    SpmResult,
    job_of,
)
from tests.connector.toy_connector import ToyReport

pytestmark = pytest.mark.vllm

ONE = SpmReport(frozenset({SpmResult(0, 1, None)}), ToyReport([]))
OTHER = SpmReport(frozenset({SpmResult(1, 1, "no")}))


def test_results_of_ranks_are_kept_apart() -> None:
    assert ONE.aggregate(OTHER).results == ONE.results | OTHER.results
    assert OTHER.aggregate(ONE).results == ONE.aggregate(OTHER).results


def test_the_inner_reports_merge_as_they_do_alone() -> None:
    assert ONE.aggregate(OTHER).inner is ONE.inner
    assert OTHER.aggregate(ONE).inner is ONE.inner
    assert OTHER.aggregate(OTHER).inner is None
    assert ONE.aggregate(ONE).inner == ToyReport([])


def test_a_request_has_the_number_of_its_job() -> None:
    assert job_of(f"{REQUEST_PREFIX}17") == 17
