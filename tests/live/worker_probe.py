"""What tests do inside the workers of a server: read KV bytes, hold up copies.

``--worker-extension-cls tests.live.worker_probe.WorkerProbe`` adds the methods of
``WorkerProbe`` to vLLM's worker, and ``POST /collective_rpc`` of its development mode
calls them; arguments travel as text.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from tests.connector.copy_gate import CopyGate, GatePlan

if TYPE_CHECKING:
    import torch

    from sam_connector.connector.worker import WorkerSide

EXTENSION = f"{__name__}.WorkerProbe"
ALL_RANKS = ""


class WorkerProbe:
    """Methods for vLLM's worker, under names that it does not have."""

    rank: int
    model_runner: Any

    def sam_test_digests(self) -> dict[str, str]:
        """A digest over all layers of every block that is not all zeros, by block id.

        Read from the model runner's tensors, whose first axis counts blocks.
        """
        layers: list[torch.Tensor] = self.model_runner.kv_caches
        digests = {}
        for block_id in range(len(layers[0])):
            parts = [layer[block_id].contiguous().numpy() for layer in layers]
            if any(part.any() for part in parts):
                data = b"".join(part.tobytes() for part in parts)
                digests[str(block_id)] = hashlib.sha256(data).hexdigest()
        return digests

    def sam_test_wipe(self) -> None:
        """Zeros in every block: what is read from now on was written after this."""
        for layer in self.model_runner.kv_caches:
            layer.zero_()

    def sam_test_hold(self, rank: str = ALL_RANKS) -> None:
        """Copies submitted from now on end when released."""
        if rank in (ALL_RANKS, str(self.rank)):
            _gate().hold()

    def sam_test_pass(self) -> None:
        """New copies are not held any more; those that are held still are."""
        _gate().is_holding = False

    def sam_test_fail_next(self, rank: str = ALL_RANKS) -> None:
        """The next copy fails after the first half of its blocks."""
        if rank in (ALL_RANKS, str(self.rank)):
            _gate().fail_next()

    def sam_test_held(self) -> dict[str, int]:
        """How many copies wait for their release."""
        return {"held": len(_gate().held)}

    def sam_test_open(self) -> None:
        """Releases every copy, with success."""
        _gate().open()

    def sam_test_remove_gate(self) -> None:
        """Back to the copy engine itself; for an idle server."""
        side = _worker_side()
        assert not side.engine.num_in_flight
        if isinstance(side.engine, _HoldingGate):
            side.engine = side.engine.engine


class _HoldingGate(CopyGate):
    """A step that waits for its copies does not get those that are held."""

    @override
    def drain(self, timeout_s: float | None = None) -> bool:
        return not self.num_in_flight


def _worker_side() -> WorkerSide:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    side: WorkerSide = connector.worker_side
    return side


def _gate() -> _HoldingGate:
    """The gate in front of this rank's copy engine, put there at the first call."""
    side = _worker_side()
    if not isinstance(side.engine, _HoldingGate):
        side.engine = _HoldingGate(side.engine, 0, GatePlan())
    return side.engine
