"""vLLM's own hook for routes: ``vllm.endpoint_plugins``.

It loads only where ``VLLM_PLUGINS`` names it, and then does what ``--middleware
sam_connector.AgentHintMiddleware`` does; with both, the access layer is installed
once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sam_connector.middleware.install import register_endpoints

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI
    from starlette.datastructures import State


class SamEndpointPlugin:
    """Implements vLLM's ``EndpointPlugin``."""

    name = "sam"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        register_endpoints(app)

    async def init_state(
        self, engine_client: Any, state: State, args: Namespace
    ) -> None:
        """Nothing: the engine is looked up when a control call needs it."""
