"""Replays an agent trace on vLLM's real KV cache manager, in virtual time."""
