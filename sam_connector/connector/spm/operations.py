"""Offload and prefetch as the inner connector can be made to do them."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from sam_connector.connector.spm.sequences import TokenSequence
from sam_connector.core.tiers import OperationHandle
from sam_connector.core.types import BlockCounts, EditStatus, SessionKey

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Target(NamedTuple):
    """The first blocks of a sequence.

    Attributes:
        sequence: ``None`` if its tokens are not remembered.
        context_id: of the context it is; ``None`` if the manager knows none.
    """

    sequence: TokenSequence | None
    num_blocks: int
    context_id: int | None


class Kind(enum.Enum):
    OFFLOAD = "offload"
    PREFETCH = "prefetch"


@dataclass(eq=False, slots=True, kw_only=True)
class Operation:
    """One edit that a client asked for.

    Attributes:
        targets: what is left to do.
        deadline: of waiting for the inner connector to make up its mind.
        is_cancelled: nothing more is done, and what is done is not kept.
    """

    operation_id: str
    kind: Kind
    session: SessionKey
    targets: deque[Target]
    deadline: float
    num_requested: int = 0
    num_done: int = 0
    num_already: int = 0
    block_bytes: int = 0
    is_cancelled: bool = False
    reasons: list[str] = field(default_factory=list)

    def skip(self, reason: str | None) -> None:
        """No more can be done for the target at hand."""
        self.targets.popleft()
        if reason is not None:
            self.reasons.append(reason)

    def outcome(self) -> OperationHandle:
        num_there = self.num_done + self.num_already
        if num_there == self.num_requested and not self.is_cancelled:
            status = EditStatus.COMPLETED
        elif num_there and not self.is_cancelled:
            status = EditStatus.PARTIAL
        else:
            status = EditStatus.REJECTED
        reason = self.reasons[0] if self.reasons else None
        if status is EditStatus.COMPLETED:
            reason = None
        return OperationHandle(
            status=status,
            blocks=BlockCounts(
                requested=self.num_requested,
                done=self.num_done,
                already=self.num_already,
                missing=self.num_requested - num_there,
            ),
            num_bytes=self.num_done * self.block_bytes,
            reason=reason,
        )


@dataclass(eq=False, slots=True, kw_only=True)
class Transfer:
    """A load or save of ours under way.

    Attributes:
        job_id: that the ranks report.
        request: that the inner connector knows it by.
        target: what is loaded or saved.
        blocks: the request's.
        pins: blocks to be given back when it ends.
        loaded: block by index in the sequence, to be published.
        generation: what is loaded is void if there was a reset since.
    """

    job_id: int
    operation: Operation
    request: Request
    target: Target
    blocks: Sequence[Any]
    pins: Sequence[Any]
    loaded: dict[int, Any]
    generation: int
