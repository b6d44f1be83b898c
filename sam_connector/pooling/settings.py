"""Settings of the pooling manager, with their units in their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sam_connector.core.types import GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """Settings of ``SessionPoolingManager``.

    Attributes:
        ttl_s: life of a value from its last refresh.
        keep_alive_interval_s: how often what live leases cover is refreshed.
        lookup_timeout_s: longest that ``lookup`` answers ``None``.
        positive_ttl_s: how long it is believed that a value is there.
        negative_ttl_s: how long it is believed that a value is not there.
        call_timeout_s: deadline of each call to the store.
        tombstone_ttl_s: how long an ended session cannot be revived by a late write.
        manifest_ttl_s: life of a manifest from its last refresh.
        max_lease_s: longest lease that another engine's manifest can ask for.
        max_manifest_bytes: larger ones are neither written nor read.
        max_manifest_contexts: most contexts of one.
        max_manifest_blocks: most blocks of one, all contexts and groups together.
        max_batch_keys: most keys in one call to the store.
        max_queued_calls: most calls about sessions that wait at a time.
        max_questions: most chunks that look-ups wait to hear about.
        max_answers: most chunks that are remembered to be there, or not.
        max_tracked: most chunks of sessions that are remembered.
        max_attempts: how often a call about a session is tried.
        retry_s: wait before the second attempt; it doubles.
        max_verified_chunks: most chunks that are looked for before a manifest that
            names them is written.
        block_sizes: tokens in a block of each group; empty if they are not known.
    """

    ttl_s: float = 3_600.0
    keep_alive_interval_s: float = 60.0
    lookup_timeout_s: float = 0.05
    positive_ttl_s: float = 5.0
    negative_ttl_s: float = 1.0
    call_timeout_s: float = 0.5
    tombstone_ttl_s: float = 3_600.0
    manifest_ttl_s: float = 24 * 3_600.0
    max_lease_s: float = 24 * 3_600.0
    max_manifest_bytes: int = 8 << 20
    max_manifest_contexts: int = 1_024
    max_manifest_blocks: int = 1 << 20
    max_batch_keys: int = 1_000
    max_queued_calls: int = 10_000
    max_questions: int = 65_536
    max_answers: int = 1 << 19
    max_tracked: int = 1 << 20
    max_attempts: int = 4
    retry_s: float = 0.1
    max_verified_chunks: int = 64
    block_sizes: Mapping[GroupId, int] = field(default_factory=dict)

    @property
    def known_s(self) -> float:
        """How long a value counts as written without another look at the store.

        What keep-alive refreshes is confirmed more often than that.
        """
        return min(1.5 * self.keep_alive_interval_s + 5, self.ttl_s / 2)
