"""Every bound on what a client can make the engine keep or do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on sessions, records, time and work.

    Attributes:
        max_sessions: sessions known at once, over all tenants.
        max_contexts: contexts per session.
        max_records: (block, context) pairs over all sessions, and blocks that are
            remembered though no session holds them.
        max_tree_depth: generations from a session to its oldest ancestor, when it
            names its parent.
        max_edits: edits in one hint or control call.
        max_operations: asynchronous operations remembered.
        max_ttl_s: longest lease.
        idle_ttl_s: how long a context without a lease is remembered unused.
        max_protected_fraction: share of the pool that may be under a deadline.
        max_expiries_per_step: contexts expired in one engine step.
    """

    max_sessions: int = 65_536
    max_contexts: int = 4
    max_records: int = 4_194_304
    max_tree_depth: int = 64
    max_edits: int = 16
    max_operations: int = 4_096
    max_ttl_s: float = 3_600.0
    idle_ttl_s: float = 3_600.0
    max_protected_fraction: float = 0.8
    max_expiries_per_step: int = 64
