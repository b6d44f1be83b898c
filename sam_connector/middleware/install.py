"""How the access layer gets inside the server's check of API keys.

What ``--middleware`` names runs *outside* that check, so ``AgentHintMiddleware`` only
looks for the application and installs two things in it: the control routes, which as
routes are inside, and the lowering layer around the router's own stack, which the
check and all other middleware enclose and which runs before routing.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from sam_connector.middleware.access import Access
from sam_connector.middleware.control_routes import control_routes
from sam_connector.middleware.lowering_layer import LoweringLayer

_STATE_NAME = "sam_access"


def register_endpoints(app: Starlette, access: Access | None = None) -> None:
    """Installs the access layer in an application, once.

    Args:
        app: the server's application, before or while it serves.
        access: settings other than the defaults.
    """
    if getattr(app.state, _STATE_NAME, None) is not None:
        return
    access = access or Access(app)
    setattr(app.state, _STATE_NAME, access)
    app.router.routes.extend(control_routes(access))
    app.router.middleware_stack = LoweringLayer(app.router.middleware_stack, access)


class AgentHintMiddleware:
    """For ``--middleware sam_connector.AgentHintMiddleware``; passes everything on.

    It installs on the first message it sees: lifespan, which comes before any
    request, or the first request where a server runs without lifespan.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._is_installed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_installed and "app" in scope:
            register_endpoints(scope["app"])
            self._is_installed = True
        await self.app(scope, receive, send)
