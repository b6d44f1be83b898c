"""The session-aware pooling manager (the RFC's SPM): sessions and a store.

It knows which values in the store belong to which sessions, keeps those of live
leases alive, answers what is there, and lets other instances find a session. It
moves no block itself: ranks do that.
"""
