"""The demo: real coding agents replayed against stock vLLM and against ours."""
