"""vLLM's own route hook does the same as the middleware."""

from __future__ import annotations

import asyncio

import pytest

from sam_connector.middleware.endpoint_plugin import SamEndpointPlugin
from sam_connector.protocol.control import success
from tests.middleware.driver import call, make_server


def test_it_installs_the_access_layer() -> None:
    server = make_server(install=False)
    server.engine.answer = lambda command: success({"sessions": []})
    plugin = SamEndpointPlugin()
    plugin.attach_router(server.app)
    asyncio.run(plugin.init_state(None, server.app.state, server.app.state.args))
    assert call(server.app, "GET", "/v1/agent/sessions", b"").status == 200
    server.post("/v1/completions", {"agent_hint": {"session_id": "s"}})
    assert server.last_body["session_id"] == "s"


@pytest.mark.vllm
def test_it_is_what_vllm_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import plugins
    from vllm.plugins.endpoint_plugins import interface

    plugin = SamEndpointPlugin()
    assert isinstance(plugin, interface.EndpointPlugin)
    monkeypatch.setattr(plugins, "load_endpoint_plugins", lambda tasks: [plugin])
    server = make_server(install=False)
    interface.attach_endpoint_plugins(server.app, ("generate",))
    assert call(server.app, "GET", "/v1/agent/stats", b"").status == 200
