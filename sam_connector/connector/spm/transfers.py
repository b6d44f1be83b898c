"""Carries out offloads and prefetches through the inner connector, one at a time.

A prefetch is a load of the lowest priority: it begins in a step in which the inner
connector loads nothing for the engine's requests, takes none of the blocks that are
reserved for them or leased to a session, and gives what it took back when it ends.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sam_connector.connector.spm.config import SpmConfig
from sam_connector.connector.spm.inner import InnerScheduler
from sam_connector.connector.spm.metadata import JobKind, SpmJob, job_of
from sam_connector.connector.spm.operations import Kind, Operation, Target, Transfer
from sam_connector.connector.spm.requests import RequestWatch
from sam_connector.connector.spm.saved_keys import SavedKeys
from sam_connector.connector.spm.sequences import TokenSequence
from sam_connector.connector.spm.synthetic import scheduled
from sam_connector.core.clock import Clock
from sam_connector.core.slot_pool import Content
from sam_connector.core.types import BlockHash, GroupId, SessionKey
from sam_connector.vllm_adapter.gpu_cache import GpuCache

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData

logger = logging.getLogger(__name__)

_GROUP = GroupId(0)
#: Between two look-ups of an inner connector that asked to be asked again.
_ASK_AGAIN_S = 0.02


@dataclass(slots=True)
class Begun:
    """What begins in a step: requests for the inner connector, jobs for the ranks."""

    requests: list[NewRequestData] = field(default_factory=list)
    jobs: list[SpmJob] = field(default_factory=list)


class Transfers:
    """The queue of operations and the transfer under way.

    Args:
        config: settings.
        inner: the inner connector.
        gpu: the engine's cache.
        keys: what is saved.
        watch: the engine's own requests.
        clock: where time comes from.
        block_bytes: size of a block, all ranks together.
        on_ended: told of every operation that has ended.
        on_loaded: told what of a target is in the engine's cache now, before it may
            be lost again.
    """

    def __init__(
        self,
        config: SpmConfig,
        inner: InnerScheduler,
        gpu: GpuCache,
        keys: SavedKeys,
        watch: RequestWatch,
        clock: Clock,
        *,
        block_bytes: int,
        on_ended: Callable[[Operation], None],
        on_loaded: Callable[[SessionKey, Target], None],
    ) -> None:
        self._config = config
        self._inner = inner
        self._gpu = gpu
        self._keys = keys
        self._watch = watch
        self._clock = clock
        self._block_bytes = block_bytes
        self._on_ended = on_ended
        self._on_loaded = on_loaded
        self._queue: deque[Operation] = deque()
        self._active: Transfer | None = None
        #: It has ended, but the inner connector still reads the blocks.
        self._lingering: dict[int, Transfer] = {}
        self._generation = 0
        self._num_loads_of_target = 0
        self._is_target_begun = False
        self._ask_at = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def has_pending(self) -> bool:
        """Whether steps must go on: an answer is due, or blocks are pinned."""
        return bool(self._queue or self._active or self._lingering)

    @property
    def has_pinned(self) -> bool:
        return bool(self._active or self._lingering)

    def add(
        self, kind: Kind, operation_id: str, session: SessionKey, targets: list[Target]
    ) -> str | None:
        """Queues an operation; returns why not, if it is refused."""
        if len(self._queue) >= self._config.max_operations:
            return f"{len(self._queue)} operations wait already"
        deadline = self._clock.now() + self._config.confirm_timeout_s
        self._queue.append(
            Operation(
                operation_id=operation_id,
                kind=kind,
                session=session,
                targets=deque(targets),
                deadline=deadline,
                num_requested=sum(target.num_blocks for target in targets),
                block_bytes=self._block_bytes,
            )
        )
        return None

    def cancel(self, session: SessionKey | None, reason: str) -> None:
        """Ends a session's operations, or all; what is under way is not kept."""
        for operation in list(self._queue):
            if session is None or operation.session == session:
                operation.is_cancelled = True
                operation.reasons.insert(0, reason)
                if self._active is None or self._active.operation is not operation:
                    self._end(operation)

    def reset(self) -> None:
        """All content is void."""
        self._generation += 1
        self.cancel(None, "the cache was reset")

    def begin(self, *, is_busy: bool) -> Begun:
        """Begins what can be begun in this step.

        Args:
            is_busy: the inner connector loads for the engine's requests.
        """
        begun = Begun()
        while self._queue and self._active is None and not is_busy:
            operation = self._queue[0]
            if not operation.targets:
                self._end(operation)
            elif self._clock.now() < self._ask_at or not self._advance(
                operation, begun
            ):
                break
        return begun

    def on_job_ended(self, job_id: int, error: str | None) -> None:
        """Every rank has reported a job of ours."""
        lingering = self._lingering.pop(job_id, None)
        if lingering is not None:
            self._gpu.unpin(lingering.pins)
            return
        transfer = self._active
        if transfer is None or transfer.job_id != job_id:
            return
        self._active = None
        operation = transfer.operation
        if error is not None:
            self._fail(transfer, error)
        elif transfer.generation != self._generation or operation.is_cancelled:
            logger.debug("a transfer of a cancelled operation has ended")
        elif operation.kind is Kind.PREFETCH:
            self._publish(transfer)
        else:
            self._note_saved(transfer)
        if self._inner.forget(transfer.request, [b.block_id for b in transfer.blocks]):
            self._lingering[job_id] = transfer
        else:
            self._gpu.unpin(transfer.pins)
        if operation.is_cancelled:
            self._end(operation)

    # --- one operation ----------------------------------------------------------------

    def _advance(self, operation: Operation, begun: Begun) -> bool:
        """Goes on with the target at hand; returns whether to go on at once."""
        target = operation.targets[0]
        if target.sequence is None:
            self._skip(operation, "the session's tokens are not remembered")
            return True
        if operation.kind is Kind.PREFETCH:
            return self._advance_load(operation, target, target.sequence, begun)
        return self._advance_save(operation, target, target.sequence, begun)

    def _advance_load(
        self,
        operation: Operation,
        target: Target,
        sequence: TokenSequence,
        begun: Begun,
    ) -> bool:
        traits = self._config.traits
        resident = self._resident(sequence, target.num_blocks)
        num_resident = len(resident)
        if not self._is_target_begun:
            operation.num_already += num_resident
            self._is_target_begun = True
        if num_resident == target.num_blocks:
            self._on_loaded(operation.session, target)
            self._skip(operation, None)
            return True
        reason = self._why_no_load(sequence, target.num_blocks, num_resident)
        if reason is not None:
            self._skip(operation, reason)
            return True
        length = self._wanted(sequence, target.num_blocks, num_resident)
        found = self._inner.find(sequence, length, num_resident)
        if found.num_tokens is None:
            self._inner.forget(found.request)
            return self._ask_again(operation, "the inner look-up gave no answer")
        count = min(found.num_tokens // sequence.block_size, length - num_resident)
        if count <= 0:
            self._inner.forget(found.request)
            return self._missing(operation, sequence, length)
        first = 0 if traits.whole_sequences else num_resident
        last = num_resident + count
        num_new = last - first + (0 if found.is_async else 1)
        self._gpu.pin(resident)
        if self._gpu.num_takeable(num_new) < num_new:
            self._gpu.unpin(resident)
            self._inner.forget(found.request)
            self._skip(operation, "no room in the engine's cache beyond the reserve")
            return True
        taken = self._gpu.take(num_new)
        blocks = [*resident[:first], *taken]
        found.request.num_computed_tokens = last * sequence.block_size
        self._inner.load(found, blocks)
        if not found.is_async:
            begun.requests.append(scheduled(found.request, blocks))
        loaded = dict(zip(range(first, last), taken, strict=False))
        job = SpmJob(
            job_id=job_of(found.request.request_id),
            kind=JobKind.LOAD,
            request_id=found.request.request_id,
            block_ids=tuple(block.block_id for block in loaded.values()),
            is_async=found.is_async,
        )
        begun.jobs.append(job)
        self._num_loads_of_target += 1
        self._active = Transfer(
            job_id=job.job_id,
            operation=operation,
            request=found.request,
            target=target,
            blocks=blocks,
            pins=[*resident, *taken],
            loaded={i: b for i, b in loaded.items() if i >= num_resident},
            generation=self._generation,
        )
        return True

    def _advance_save(
        self,
        operation: Operation,
        target: Target,
        sequence: TokenSequence,
        begun: Begun,
    ) -> bool:
        traits, count = self._config.traits, target.num_blocks
        is_known = self._keys.num_saved(sequence, count) == count
        if is_known or not traits.synthetic_save:
            num_found = self._inner.num_found(sequence, count)
            if num_found == count:
                self._keys.add_saved(sequence.hashes[:count])
                self._keys.claim(operation.session, sequence)
                operation.num_already += count
                self._skip(operation, None)
                return True
            if not traits.synthetic_save:
                # It saves on its own; all there is to do is to wait for it.
                if self._clock.now() < operation.deadline:
                    self._ask_at = self._clock.now() + _ASK_AGAIN_S
                    return False
                operation.num_already += num_found or 0
                self._skip(operation, "the inner connector has not saved all of it")
                return True
            self._keys.drop(sequence.hashes[count - 1 : count])
        blocks = self._resident(sequence, count)
        if len(blocks) < count:
            operation.num_already += self._keys.num_saved(sequence, count)
            self._skip(operation, "not all of it is in the engine's cache")
            return True
        self._gpu.pin(blocks)
        request = self._inner.add_to_save(sequence, count, blocks)
        begun.requests.append(scheduled(request, blocks))
        job = SpmJob(job_of(request.request_id), JobKind.SAVE, request.request_id)
        begun.jobs.append(job)
        self._active = Transfer(
            job_id=job.job_id,
            operation=operation,
            request=request,
            target=target,
            blocks=blocks,
            pins=blocks,
            loaded={},
            generation=self._generation,
        )
        return True

    def _why_no_load(
        self, sequence: TokenSequence, num_blocks: int, num_resident: int
    ) -> str | None:
        length = self._wanted(sequence, num_blocks, num_resident)
        limit = self._config.max_prefetch_blocks
        if length <= num_resident:
            return "no more of it is saved"
        if self._config.traits.whole_sequences and length > limit:
            return f"it is longer than max_prefetch_blocks, which is {limit}"
        if self._watch.is_lost(sequence.hashes[length - 1]):
            return "the inner connector could not load it a moment ago"
        if self._num_loads_of_target > num_blocks // limit + 1:
            return "what is loaded is displaced again at once"
        return None

    def _wanted(self, sequence: TokenSequence, num_blocks: int, resident: int) -> int:
        """How much of a sequence to ask for."""
        if self._config.traits.whole_sequences:
            return self._keys.num_saved(sequence, num_blocks) or num_blocks
        return min(num_blocks, resident + self._config.max_prefetch_blocks)

    def _missing(
        self, operation: Operation, sequence: TokenSequence, length: int
    ) -> bool:
        """A look-up found nothing of what was asked for."""
        is_known = self._keys.num_saved(sequence, length) == length
        self._keys.drop(sequence.hashes[length - 1 : length])
        if not (is_known and self._config.traits.whole_sequences):
            self._skip(operation, "the inner connector does not have it")
        return True  # a shorter one may be there

    def _ask_again(self, operation: Operation, reason: str) -> bool:
        if self._clock.now() >= operation.deadline:
            self._skip(operation, reason)
            return True
        self._ask_at = self._clock.now() + _ASK_AGAIN_S
        return False

    def _resident(self, sequence: TokenSequence, num_blocks: int) -> list[Any]:
        """The engine's blocks of the longest prefix that it has all of."""
        contents: Iterable[Content] = (
            (_GROUP, h) for h in itertools.islice(sequence.hashes, num_blocks)
        )
        found = map(self._gpu.find, contents)
        return list(itertools.takewhile(lambda block: block is not None, found))

    def _publish(self, transfer: Transfer) -> None:
        sequence = transfer.target.sequence
        assert sequence is not None
        hashes: list[BlockHash] = sequence.hashes
        for index, block in transfer.loaded.items():
            content: Content = (_GROUP, hashes[index])
            # It may have been computed meanwhile.
            if self._gpu.find(content) is None:
                self._gpu.publish(block, content, index)
        transfer.operation.num_done += len(transfer.loaded)
        # Before the blocks are free: the next step may take them.
        self._on_loaded(transfer.operation.session, transfer.target)

    def _note_saved(self, transfer: Transfer) -> None:
        target = transfer.target
        assert target.sequence is not None
        self._keys.add_saved(target.sequence.hashes[: target.num_blocks])
        self._keys.claim(transfer.operation.session, target.sequence)
        transfer.operation.num_done += target.num_blocks
        self._skip(transfer.operation, None)

    def _fail(self, transfer: Transfer, error: str) -> None:
        operation, sequence = transfer.operation, transfer.target.sequence
        assert sequence is not None
        logger.warning("%s: %s", operation.kind.value, error)
        if operation.kind is Kind.PREFETCH:
            leaf = sequence.hashes[max(transfer.loaded)]
            self._keys.drop([leaf])
            self._watch.note_lost(leaf)
        if operation.targets and not operation.is_cancelled:
            self._skip(operation, f"it failed: {error}")

    def _skip(self, operation: Operation, reason: str | None) -> None:
        operation.skip(reason)
        self._num_loads_of_target = 0
        self._is_target_begun = False

    def _end(self, operation: Operation) -> None:
        self._queue.remove(operation)
        self._num_loads_of_target = 0
        self._is_target_begun = False
        self._on_ended(operation)
