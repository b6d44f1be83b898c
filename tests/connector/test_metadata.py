"""What passes between scheduler and ranks: merged in any order, sent as it is."""

from __future__ import annotations

import functools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from sam_connector.connector.metadata import (
    EMPTY_METADATA,
    RankHandshake,
    RankResult,
    SAMConnectorMetadata,
    WorkerReport,
)
from sam_connector.transfer.contract import CopyJob, Direction, GroupCopy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

RESULTS = st.builds(
    RankResult, st.integers(0, 3), st.integers(1, 4), st.sampled_from([None, "failed"])
)
REPORTS = st.frozensets(RESULTS, max_size=6).map(WorkerReport)
deterministic = settings(database=None, deadline=None, derandomize=True)


@deterministic
@given(REPORTS, REPORTS, REPORTS)
def test_i04_reports_may_be_merged_in_any_grouping(
    a: WorkerReport, b: WorkerReport, c: WorkerReport
) -> None:
    assert a.aggregate(b).aggregate(c) == a.aggregate(b.aggregate(c))


@deterministic
@given(REPORTS, REPORTS)
def test_i04_reports_may_be_merged_in_any_order(
    a: WorkerReport, b: WorkerReport
) -> None:
    assert a.aggregate(b) == b.aggregate(a)


@deterministic
@given(REPORTS, REPORTS)
def test_i04_a_report_that_is_merged_twice_counts_once(
    a: WorkerReport, b: WorkerReport
) -> None:
    merged = a.aggregate(b)
    assert a.aggregate(a) == a
    assert merged.aggregate(b) == merged


@deterministic
@given(st.lists(REPORTS, min_size=1, max_size=4))
def test_merging_loses_nothing_and_adds_nothing(reports: list[WorkerReport]) -> None:
    merged = functools.reduce(WorkerReport.aggregate, reports)
    assert merged.results == set().union(*(report.results for report in reports))


def test_merging_leaves_the_reports_as_they_are() -> None:
    a, b = (WorkerReport(frozenset([RankResult(r, 1, None)])) for r in range(2))
    a.aggregate(b)
    assert (len(a.results), len(b.results)) == (1, 1)


def test_vllm_merges_the_reports_of_all_ranks() -> None:
    """A rank that has nothing to say reports ``None``."""
    outputs: list[ModelRunnerOutput | None] = []
    for said in (
        WorkerReport(frozenset([RankResult(0, 1, None)])),
        None,
        WorkerReport(frozenset([RankResult(2, 1, "failed"), RankResult(2, 2, None)])),
    ):
        output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
        output.kv_connector_output = KVConnectorOutput(kv_connector_worker_meta=said)
        outputs.append(output)
    merged = KVOutputAggregator(3).aggregate(outputs)
    assert merged is not None
    assert merged.kv_connector_output is not None
    report = merged.kv_connector_output.kv_connector_worker_meta
    assert isinstance(report, WorkerReport)
    assert report.results == {
        RankResult(0, 1, None),
        RankResult(2, 1, "failed"),
        RankResult(2, 2, None),
    }


@pytest.mark.parametrize(
    "value",
    [
        EMPTY_METADATA,
        SAMConnectorMetadata(
            jobs=(CopyJob(7, Direction.LOAD, (GroupCopy(0, [1, 2], [3, 4]),)),),
            request_ids={7: "r"},
        ),
        WorkerReport(frozenset([RankResult(1, 7, "failed")])),
        RankHandshake(num_slots=9),
    ],
)
def test_it_arrives_in_another_process_as_it_was_sent(value: object) -> None:
    assert pickle.loads(pickle.dumps(value)) == value


def test_nothing_to_copy_is_one_object() -> None:
    assert EMPTY_METADATA.jobs == ()
    assert not EMPTY_METADATA.request_ids
