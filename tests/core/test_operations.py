from __future__ import annotations

from sam_connector.core.operations import OperationTable
from sam_connector.core.types import EditResult, EditStatus, EditType
from tests.core.builders import key


def result(operation_id: str, status: EditStatus = EditStatus.ACCEPTED) -> EditResult:
    return EditResult(type=EditType.OFFLOAD, status=status, operation_id=operation_id)


def test_ids_are_never_used_twice() -> None:
    table = OperationTable(max_operations=2)
    assert len({table.new_id() for _ in range(10)}) == 10


def test_a_later_state_replaces_an_earlier_one() -> None:
    table = OperationTable(max_operations=2)
    table.record(key("s"), result("op"))
    assert [r.operation_id for r in table.open_of(key("s"))] == ["op"]
    table.record(key("s"), result("op", EditStatus.COMPLETED))
    assert len(table) == 1
    assert table.get("op") == (key("s"), result("op", EditStatus.COMPLETED))
    assert table.open_of(key("s")) == []


def test_open_operations_belong_to_one_session() -> None:
    table = OperationTable(max_operations=2)
    table.record(key("s"), result("op"))
    assert table.open_of(key("t")) == []
    assert table.open_of(key("s", tenant="other")) == []


def test_the_oldest_operation_is_forgotten_first() -> None:
    table = OperationTable(max_operations=2)
    for name in ("one", "two", "three"):
        table.record(key("s"), result(name))
    assert len(table) == 2
    assert table.get("one") is None
    assert table.get("three") is not None


def test_open_operations_are_the_last_to_be_forgotten() -> None:
    """Somebody may wait for them, and their ends still have an effect."""
    table = OperationTable(max_operations=2)
    assert table.num_open == 0
    table.record(key("s"), result("one"))
    table.record(key("s"), result("one"))
    table.record(key("t"), result("two"))
    assert table.num_open == 2
    table.record(key("s"), result("one", EditStatus.PARTIAL))
    table.record(key("s"), result("one", EditStatus.COMPLETED))
    assert table.num_open == 1
    table.record(key("s"), result("three"))
    table.record(key("s"), result("four", EditStatus.UNSUPPORTED))
    # "one" and "four" are forgotten, which had ended.
    assert table.num_open == 2
    table.record(key("s"), result("five"))
    table.record(key("s"), result("six"))
    assert table.num_open == len(table) == 2
