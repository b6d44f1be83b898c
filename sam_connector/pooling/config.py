"""Settings of the pooling manager."""

from __future__ import annotations

from dataclasses import dataclass, field

from sam_connector.pooling.manifest import ManifestLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """How the pooling manager treats the store.

    Attributes:
        ttl_s: life of a value after it was written or refreshed.
        keep_alive_interval_s: between two refreshes of a value.
        lookup_timeout_s: how long a look-up is told to ask again.
        positive_ttl_s: how long a value that is there is believed to stay.
        negative_ttl_s: how long one that is not is believed not to come.
        call_timeout_s: for each call to the store; look-ups may be answered so late,
            for those who ask next.
        manifest_ttl_s: life of a manifest after it was written or refreshed.
        tombstone_ttl_s: how long a session that has ended stays ended for writes
            that are older.
        max_attempts: of a manifest's write.
        retry_s: before the second attempt; it doubles.
        max_batch: values in one call.
        max_open: calls about sessions that wait.
        max_tracked: (session, value) pairs remembered.
        max_versions: manifests whose version is remembered.
        manifest: what a manifest may contain.
    """

    ttl_s: float = 3_600.0
    keep_alive_interval_s: float = 60.0
    lookup_timeout_s: float = 0.05
    positive_ttl_s: float = 5.0
    negative_ttl_s: float = 1.0
    call_timeout_s: float = 0.5
    manifest_ttl_s: float = 86_400.0
    tombstone_ttl_s: float = 3_600.0
    max_attempts: int = 3
    retry_s: float = 0.1
    max_batch: int = 2_000
    max_open: int = 4_096
    max_tracked: int = 4_194_304
    max_versions: int = 65_536
    manifest: ManifestLimits = field(default_factory=ManifestLimits)
