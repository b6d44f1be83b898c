"""A frozen picture of the manager's accounts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Gauges first, counters since start after them; blocks are counted once.

    Attributes:
        sessions: sessions known.
        contexts: contexts known.
        records: (block, context) pairs.
        timers: entries on the timer wheel.
        running_requests: requests of known sessions that run.
        claimed_blocks: resident blocks that some session holds.
        protected_blocks: those under the lease of a context at rest.
        hinted_requests: requests that named a session.
        leases_granted: leases given or renewed, those refused later included.
        leases_expired: leases that ran out.
        leases_broken: protected blocks handed out because nothing else was free.
        claims_broken: blocks held without a lease that were handed out.
        leases_refused: leases not given, or ended when their context came to rest,
            because the protected share was used up.
        sessions_dropped: sessions forgotten because a bound was reached.
        contexts_dropped: contexts forgotten because a bound was reached.
        contexts_superseded: contexts replaced by a compaction or a rewind.
        hints_rejected: hints, or parts of one, that were not acted on.
        edits: edits by type and status, as ``"evict/completed"``.
        saved_bytes: bytes that tiers reported saved.
        loaded_bytes: bytes that tiers reported loaded.
        tier_misses: blocks that tiers reported missing.
        tier_pressure: times a tier reported pressure.
    """

    sessions: int
    contexts: int
    records: int
    timers: int
    running_requests: int
    claimed_blocks: int
    protected_blocks: int
    hinted_requests: int
    leases_granted: int
    leases_expired: int
    leases_broken: int
    claims_broken: int
    leases_refused: int
    sessions_dropped: int
    contexts_dropped: int
    contexts_superseded: int
    hints_rejected: int
    edits: dict[str, int]
    saved_bytes: int
    loaded_bytes: int
    tier_misses: int
    tier_pressure: int
