"""The only place, with ``connector``, that knows vLLM's inside."""
