"""How the inner connector is found, and when the engine does not start."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import KVTransferConfig

from benchmarks.engine_config import KVShape
from sam_connector.connector.spm.build import inner_transfer_config
from sam_connector.connector.spm.connector import SPMConnector
from sam_connector.core.types import EditType
from sam_connector.errors import ConfigurationError
from tests.connector.spm.driving import SEQUENCE_TRAITS, SpmDriver

pytestmark = pytest.mark.vllm

MODULE = "tests.connector.spm.inner_connectors"


def test_the_inner_connector_sees_its_own_settings_only() -> None:
    with SpmDriver(inner_config={"fault": "never"}) as driver:
        config = driver.inner._kv_transfer_config
        assert config.kv_connector == "FaultyToy"
        assert config.kv_connector_extra_config["fault"] == "never"
        assert "inner" not in config.kv_connector_extra_config
        assert config.kv_role == "kv_both"
        assert config.kv_load_failure_policy == "recompute"
        outer = driver.connector._kv_transfer_config
        assert config.engine_id == outer.engine_id


def test_what_inner_says_goes_before_what_is_inherited() -> None:
    outer = KVTransferConfig(
        kv_connector="SPMConnector",
        kv_role="kv_both",
        kv_port=1,
        kv_load_failure_policy="recompute",
    )
    config = inner_transfer_config(
        outer, {"kv_connector": "X", "kv_role": "kv_consumer", "kv_port": 2}
    )
    assert (config.kv_role, config.kv_port) == ("kv_consumer", 2)
    assert config.kv_load_failure_policy == "recompute"


@pytest.mark.parametrize(
    ("inner", "problem"),
    [
        ({"kv_connector": "NoSuchConnector"}, "Unsupported connector type"),
        ({"kv_connector": "X", "kv_connector_module_path": MODULE}, "X not found"),
        ({"kv_connector": "X", "kv_connector_module_path": "no.where"}, "No module"),
    ],
)
def test_an_inner_connector_that_is_not_there_is_named(
    inner: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        SpmDriver(extra_config={"inner": inner, "traits": {}})


def test_a_load_that_fails_must_not_fail_its_request() -> None:
    with SpmDriver() as driver:
        config = driver.scheduler.vllm_config
        assert config.kv_transfer_config is not None
        config.kv_transfer_config.kv_load_failure_policy = "fail"
        config.kv_transfer_config.kv_connector_extra_config["keep_alive_s"] = 0
        with pytest.raises(ConfigurationError) as caught:
            SPMConnector(config, driver.connector.role, driver.connector.config)
        assert len(caught.value.problems) == 2
        config.kv_transfer_config.kv_connector_extra_config["keep_alive_s"] = 1
        with pytest.raises(ConfigurationError, match="to be recompute"):
            SPMConnector(config, driver.connector.role, driver.connector.config)


def test_settings_of_the_session_manager_are_checked_as_well() -> None:
    with pytest.raises(ConfigurationError, match="unknown key 'keep_alive'"):
        SpmDriver(extra_config={"keep_alive": 1})


def test_several_groups_need_an_inner_connector_that_knows_them() -> None:
    shape = KVShape(num_full_groups=2)
    with pytest.raises(ConfigurationError, match="--disable-hybrid-kv-cache-manager"):
        SpmDriver("SequenceToy", shape=shape)
    with SpmDriver("FaultyToy", shape=shape) as driver:
        assert driver.spm.session_capabilities == {EditType.EVICT}
        driver.run("r", list(range(100)))
        driver.check_no_leak()


@pytest.mark.parametrize("supports_mla", [True, False])
def test_latent_attention_is_for_connectors_that_say_so(supports_mla: bool) -> None:
    traits = SEQUENCE_TRAITS | {"supports_mla": supports_mla}
    shape = KVShape(mla=True, head_size=8)
    with SpmDriver("SequenceToy", shape=shape, traits=traits) as driver:
        can = driver.spm.session_capabilities
        assert (EditType.PREFETCH in can) is supports_mla


@pytest.mark.parametrize(
    ("traits", "expected"),
    [
        ({}, {EditType.EVICT, EditType.OFFLOAD}),
        ({"confirm": "step"}, {EditType.EVICT}),
        ({"synthetic_load": True}, set(EditType)),
        (
            {"synthetic_save": True, "confirm": "step"},
            {EditType.EVICT, EditType.OFFLOAD},
        ),
    ],
)
def test_what_it_cannot_be_made_to_do_is_unsupported(
    traits: dict[str, Any], expected: set[EditType]
) -> None:
    with SpmDriver(traits=traits) as driver:
        assert driver.spm.session_capabilities == expected
        driver.run("r", list(range(40)), agent_hint={"session_id": "s"})
        for kind in set(EditType) - expected:
            (result,) = driver.edit("s", {"type": kind.value})
            assert result["status"] == "unsupported"
        driver.check_no_leak()
