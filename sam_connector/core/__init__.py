"""Session-aware caching without an engine: pure, clock-free, single-threaded.

Read in this order: ``types`` (the words), ``block_index`` (which sessions hold
which content), ``retention`` and ``zoned_queue`` (what that means for a free
block), ``expectations`` (who is back first), ``ttl`` (when it ends),
``session_index`` (what is remembered about a session), ``edits`` (what a client can
ask for), ``manager`` (all of it together).
Then the memory below the engine's: ``tiers`` (what a tier can be asked for),
``slot_pool`` and ``tier_contexts`` (what is in one, and for whom), ``tier_relay``
(who hears of what).

Nothing here does I/O, reads a clock, starts a thread or logs: ``now`` is always
an argument in monotonic seconds, and every call is made from one thread.
"""
