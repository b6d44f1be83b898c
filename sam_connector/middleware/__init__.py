"""The access layer inside vLLM's API server: ``agent_hint`` and the control routes.

Nothing here parses a body or answers a request outside the server's check of API
keys; ``install`` says how that comes about.
"""

from __future__ import annotations

from sam_connector.middleware.install import AgentHintMiddleware, register_endpoints

__all__ = ["AgentHintMiddleware", "register_endpoints"]
