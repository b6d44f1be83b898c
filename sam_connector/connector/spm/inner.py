"""The inner connector's scheduler role, as requests that it alone knows use it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from sam_connector.connector.spm.sequences import TokenSequence
from sam_connector.connector.spm.synthetic import as_blocks, make_request

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a look-up has found.

    Attributes:
        request: that the inner connector was asked about.
        num_tokens: beyond those that were said to be there; ``None`` to ask again.
        is_async: its load ends when the inner connector says so.
    """

    request: Request
    num_tokens: int | None
    is_async: bool


class InnerScheduler:
    """Look-ups and requests of ours.

    Args:
        connector: the inner one, in the scheduler role.

    Attributes:
        lock: held in every call of it: keep-alive has a thread of its own.
        num_lookups: how often it was asked by us.
        ended: requests of ours that it is to hear the end of in the next step.
    """

    def __init__(self, connector: KVConnectorBase_V1) -> None:
        self.connector = connector
        self.lock = threading.RLock()
        self.num_lookups = 0
        self.ended: set[str] = set()
        self._num_requests = 0

    def new_id(self) -> int:
        """Of a job, and of the request that goes with it."""
        self._num_requests += 1
        return self._num_requests

    def find(
        self, sequence: TokenSequence, num_blocks: int, num_resident: int
    ) -> Found:
        """Asks for the first blocks of a sequence; ``forget`` or load what is found.

        Args:
            sequence: what to look for.
            num_blocks: how much of it.
            num_resident: blocks that the engine has.
        """
        request = make_request(self.new_id(), sequence, num_blocks)
        num_computed = num_resident * sequence.block_size
        self.num_lookups += 1
        try:
            self.connector.on_new_request(request)
            num_tokens, is_async = self.connector.get_num_new_matched_tokens(
                request, num_computed
            )
        except Exception:
            logger.warning("a look-up of the inner connector failed", exc_info=True)
            num_tokens, is_async = 0, False
        return Found(request=request, num_tokens=num_tokens, is_async=is_async)

    def num_found(self, sequence: TokenSequence, num_blocks: int) -> int | None:
        """Blocks that a look-up finds; ``None`` to ask again."""
        found = self.find(sequence, num_blocks, 0)
        self.forget(found.request)
        if found.num_tokens is None:
            return None
        return min(num_blocks, max(0, found.num_tokens) // sequence.block_size)

    def add_to_save(
        self, sequence: TokenSequence, num_blocks: int, blocks: Sequence[KVCacheBlock]
    ) -> Request:
        """A request whose blocks are all there, for the connector to save."""
        request = make_request(self.new_id(), sequence, num_blocks)
        request.num_computed_tokens = num_blocks * sequence.block_size
        self.connector.on_new_request(request)
        self.connector.update_state_after_alloc(request, as_blocks(blocks), 0)
        return request

    def load(self, found: Found, blocks: Sequence[KVCacheBlock]) -> None:
        """Has the connector load what it found, as after an allocation."""
        assert found.num_tokens is not None
        self.connector.update_state_after_alloc(
            found.request, as_blocks(blocks), found.num_tokens
        )

    def forget(self, request: Request, block_ids: Sequence[int] = ()) -> bool:
        """A request of ours is over.

        Returns:
            Whether the connector goes on using the blocks.
        """
        request.status = RequestStatus.FINISHED_ABORTED
        self.ended.add(request.request_id)
        return self.request_finished(request, (list(block_ids),))[0]

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if isinstance(self.connector, SupportsHMA):
            return self.connector.request_finished_all_groups(request, block_ids)
        return self.connector.request_finished(request, block_ids[0])
