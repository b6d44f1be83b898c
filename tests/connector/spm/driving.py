"""Driving the real scheduler with ``SPMConnector`` and ranks that hold bytes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from sam_connector.connector.spm.tier import SpmTier
from tests.connector.driving import TieredDriver
from tests.connector.spm.inner_connectors import CALLS, LOADED, RAISING

_MODULE = "tests.connector.spm.inner_connectors"
_numbers = itertools.count()

ASYNC_TRAITS: dict[str, Any] = {"synthetic_load": True}
SEQUENCE_TRAITS: dict[str, Any] = {
    "confirm": "step",
    "whole_sequences": True,
    "synthetic_load": True,
    "synthetic_save": True,
    "needs_whole_prompt": True,
    "tells_lora_apart": False,
    "tells_salt_apart": False,
}


class SpmDriver(TieredDriver):
    """A ``TieredDriver`` whose connector wraps one of ``inner_connectors``.

    Args:
        inner: class of the inner connector.
        inner_config: its settings.
        traits: of the inner connector.
        extra_config: settings of ours.
        **options: as for ``TieredDriver``.
    """

    def __init__(
        self,
        inner: str = "FaultyToy",
        *,
        inner_config: Mapping[str, Any] | None = None,
        traits: Mapping[str, Any] | None = None,
        extra_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        RAISING.clear()
        CALLS.clear()
        LOADED.clear()
        storage = f"storage-{next(_numbers)}"
        if traits is None:
            traits = SEQUENCE_TRAITS if inner == "SequenceToy" else ASYNC_TRAITS
        settings = {
            "inner": {
                "kv_connector": inner,
                "kv_connector_module_path": _MODULE,
                "kv_connector_extra_config": {"storage": storage}
                | dict(inner_config or {}),
            },
            "traits": dict(traits),
            "failed_load_wait_s": 1e-9,
            **(extra_config or {}),
        }
        super().__init__(
            ("SPMConnector", "sam_connector.connector.spm"),
            host_bytes=None,
            extra_config=settings,
            **options,
        )

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def inner(self) -> Any:
        return self.connector.inner

    @property
    def spm(self) -> SpmTier:
        tier = self.connector.spm_tier
        assert isinstance(tier, SpmTier)
        return tier

    def close(self) -> None:
        RAISING.clear()
        super().close()

    def ask(self, session_id: str, kind: str, *, wait_s: float = 30) -> dict[str, Any]:
        """One edit, stepped until it has ended."""
        reply = self.wait(
            "apply_edits",
            tenant="",
            session_id=session_id,
            edits=[{"type": kind}],
            wait_s=wait_s,
        )
        (result,) = reply["result"]["results"]
        return dict(result)

    def empty_cache(self) -> None:
        """Loses the engine's cache and nothing else."""
        assert self.scheduler.reset_prefix_cache()

    def check(self) -> None:
        super().check()
        self.spm.check_integrity()

    def check_no_leak(self) -> None:
        super().check_no_leak()
        stats = self.spm.stats()
        assert not stats["gpu_pinned_blocks"], stats
        assert not stats["operations_open"], stats
        assert not self.spm.watch.num_live
