"""The worker role: the inner connector, and what it must not do to the engine.

What it raises ends here. A load that failed is reported as such, so that its requests
compute; and nothing is saved in that step, since it may have computed from blocks that
were not loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
)

from sam_connector.connector.spm.canary import Canary
from sam_connector.connector.spm.metadata import (
    REQUEST_PREFIX,
    JobKind,
    SpmJob,
    SpmMetadata,
    SpmReport,
    SpmResult,
    job_of,
)
from sam_connector.core.clock import Clock, MonotonicClock

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext

logger = logging.getLogger(__name__)

_COULD_NOT_LOAD = "the inner connector could not load every block"


class SpmWorker:
    """Calls one rank's inner connector.

    Args:
        inner: the connector.
        rank: of the whole engine.
        num_blocks: of the KV cache.
        failed_load_wait_s: how long a load that may have begun before the inner
            connector raised is given to end, before its blocks are used again.
        clock: where time comes from.
    """

    def __init__(
        self,
        inner: KVConnectorBase_V1,
        *,
        rank: int,
        num_blocks: int,
        failed_load_wait_s: float,
        clock: Clock | None = None,
    ) -> None:
        self._inner = inner
        self._failed_load_wait_s = failed_load_wait_s
        self._clock = clock or MonotonicClock()
        self._rank = rank
        self._num_blocks = num_blocks
        self._canary: Canary | None = None
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._step = SpmMetadata(None)
        self._context: Any = None
        self._load_error: str | None = None
        self._save_error: str | None = None
        self._num_saved_layers = 0
        #: Loads that the inner connector is to report the end of.
        self._open: dict[str, SpmJob] = {}
        #: Requests whose load is lost, and until when it may still be writing. What
        #: the inner connector says of them ends the wait, or is late.
        self._lost: dict[str, float] = {}
        self._reported: set[str] = set()
        self._errors: dict[str, str] = {}
        self._results: list[SpmResult] = []
        #: That the inner connector could not load, and that are ours to answer for.
        self._invalid: set[int] = set()
        self._our_blocks: set[int] = set()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._kv_caches = kv_caches
        self._canary = Canary(kv_caches, self._num_blocks)
        self._inner.register_kv_caches(kv_caches)

    # --- one step, in the order of the calls ------------------------------------------

    def begin(self, step: SpmMetadata) -> None:
        self._step = step
        self._load_error = self._save_error = None
        self._num_saved_layers = 0
        if step.inner is None:
            self._load_error = "the inner connector has no plan for the step"
            return
        self._inner.bind_connector_metadata(step.inner)

    def handle_preemptions(self, step: SpmMetadata) -> None:
        if step.inner is not None:
            self._inner.handle_preemptions(step.inner)

    def start_loads(self, context: ForwardContext, **kwargs: Any) -> None:
        loads = [job for job in self._step.jobs if job.kind is JobKind.LOAD]
        self._our_blocks = {b for job in self._open.values() for b in job.block_ids}
        self._our_blocks |= {b for job in loads for b in job.block_ids}
        self._open |= {job.request_id: job for job in loads if job.is_async}
        self._context = context
        if self._step.inner is None:
            return
        if loads and not self._mark(loads):
            self._load_error = "where the blocks of the KV cache lie is not known"
            return  # what it would load could not be checked
        if loads and context.attn_metadata is None:
            self._context = self._stand_in(context)
        self._try_load(self._inner.start_load_kv, self._context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._load_error is None:
            self._try_load(self._inner.wait_for_layer_load, layer_name)

    def save_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._load_error is None and self._save_error is None:
            self._num_saved_layers += 1
            self._try_save(
                self._inner.save_kv_layer, layer_name, kv_layer, attn_metadata, **kwargs
            )

    def wait_for_save(self) -> None:
        saves = [job for job in self._step.jobs if job.kind is not JobKind.LOAD]
        if any(job.kind is JobKind.SAVE for job in saves):
            self._save_without_forward()
        if self._step.inner is not None:
            self._try_save(self._inner.wait_for_save)
        self._end(saves, self._load_error or self._save_error)

    def take_transfer_results(
        self, finished_request_ids: set[str]
    ) -> KVConnectorTransferResults:
        results = self._inner.get_transfer_results(finished_request_ids)
        self._invalid = set(self._inner.get_block_ids_with_load_errors())
        late = self._reported & results.finished_recving
        self._reported -= late
        received = results.finished_recving - late
        failed = results.failed_recving - late
        over = self._take_lost(received)
        received |= over
        failed |= over
        for request_id in filter(_is_ours, received):
            error = self._errors.get(request_id, _COULD_NOT_LOAD)
            self._end_async(request_id, error if request_id in failed else None)
        for request_id in received:
            self._errors.pop(request_id, None)
        for request_id in filter(_is_ours, results.finished_sending):
            result = SpmResult(self._rank, job_of(request_id), None)
            self._results.append(result)
        return KVConnectorTransferResults(
            finished_sending={r for r in results.finished_sending if not _is_ours(r)},
            finished_recving={r for r in received if not _is_ours(r)},
            failed_recving={r for r in failed if not _is_ours(r)},
        )

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of the engine's requests that were not loaded."""
        for job in self._step.jobs:
            if job.kind is not JobKind.LOAD:
                continue
            if not job.is_async:
                self._end([job], self._load_error or self._why_wrong(job))
        invalid, self._invalid = self._invalid - self._our_blocks, set()
        if self._load_error is not None:
            invalid |= self._step.sync_blocks
        return invalid

    def take_report(self) -> SpmReport | None:
        inner = self._inner.build_connector_worker_meta()
        results, self._results = self._results, []
        if not results and inner is None:
            return None
        return SpmReport(frozenset(results), inner)

    def end(self) -> None:
        self._inner.clear_connector_metadata()
        self._context = None
        self._step = SpmMetadata(None)

    # --- internals --------------------------------------------------------------------

    def _try_load(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except Exception as error:
            self._load_error = f"{type(error).__name__}: {error}"
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()  # what it did begin, on whatever stream
            logger.warning("the inner connector could not load: %s", self._load_error)

    def _try_save(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except Exception as error:
            self._save_error = f"{type(error).__name__}: {error}"
            logger.warning("the inner connector could not save: %s", self._save_error)

    def _take_lost(self, received: set[str]) -> set[str]:
        """Requests whose load has failed, and is writing no longer."""
        if self._load_error is not None:
            jobs = [job for job in self._step.jobs if job.kind is JobKind.LOAD]
            lost = {job.request_id for job in jobs if job.is_async}
            lost |= self._step.async_requests
            until = self._clock.now() + self._failed_load_wait_s
            self._lost |= dict.fromkeys(lost, until)
            self._errors |= dict.fromkeys(lost, self._load_error)
        now = self._clock.now()
        over = {r for r, end in self._lost.items() if r in received or now >= end}
        self._reported |= over - received
        for request_id in over:
            del self._lost[request_id]
        return over

    def _mark(self, loads: list[SpmJob]) -> bool:
        if self._canary is None or not self._canary.can_mark:
            return False
        for job in loads:
            self._canary.mark(job.block_ids)
        return True

    def _why_wrong(self, job: SpmJob) -> str | None:
        """What is wrong with a load that is said to have ended well."""
        if not self._invalid.isdisjoint(job.block_ids):
            return _COULD_NOT_LOAD
        assert self._canary is not None
        count = self._canary.num_untouched(job.block_ids)
        return f"{count} parts of blocks were not written" if count else None

    def _stand_in(self, context: ForwardContext) -> Any:
        """A forward context for a step without a forward pass.

        Connectors load layer by layer, and take one without attention metadata for
        a warm-up, in which there is nothing to load.
        """
        names = dict.fromkeys(self._kv_caches)
        return SimpleNamespace(
            no_compile_layers=context.no_compile_layers, attn_metadata=names
        )

    def _save_without_forward(self) -> None:
        """Nobody has shown the inner connector the layers in this step: do so."""
        if self._num_saved_layers or self._load_error is not None:
            return
        layers = getattr(self._context, "no_compile_layers", {})
        for name, cache in self._kv_caches.items():
            layer = getattr(layers.get(name), "kv_cache", cache)
            self.save_layer(name, layer, None)

    def _end(self, jobs: list[SpmJob], error: str | None) -> None:
        self._results += [SpmResult(self._rank, job.job_id, error) for job in jobs]

    def _end_async(self, request_id: str, error: str | None) -> None:
        job = self._open.pop(request_id, None)
        if job is not None:
            self._end([job], error or self._why_wrong(job))


def _is_ours(request_id: str) -> bool:
    return request_id.startswith(REQUEST_PREFIX)
