"""From what reaches the engine with a request to one ``SessionHint``.

This is the whole contract, with or without the middleware. Where the session id and
the rest of the hint come from, first found wins:

====  ==========================================  =========================
rank  session id                                  the rest of the hint
====  ==========================================  =========================
1     ``kv_transfer_params.agent_hint``           the same object
      (where the middleware puts the body's
      ``agent_hint``)
2     ``extra_args["agent_hint"]`` (from          the same object, or JSON
      ``vllm_xargs`` or ``SamplingParams``)       text of it
3     vLLM's ``Request.session_id``, which it     nothing: the session is
      fills from the body's ``session_id``, else  recorded, not retained
      ``X-Session-ID``, else
      ``vllm_xargs["session_id"]``
4     ``extra_args["session_id"]`` (offline use)  nothing
====  ==========================================  =========================

The first hint found is the only one used; if it names no session, ranks 3 and 4 do.
A request that names none anywhere makes none.

The tenant is read from ``kv_transfer_params.agent_hint.tenant`` alone. The middleware
writes that field, and takes away what a client wrote there; a server started without
the middleware has one tenant to whoever may call it.

``manage_request`` cannot be obeyed here, since the request is already with the
engine: its edits run when the request completes, like any others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sam_connector.core.types import SessionHint, SessionKey
from sam_connector.errors import HintError
from sam_connector.protocol.agent_hint import (
    lower,
    parse_agent_hint,
    parse_session_id,
)

HINT_KEY = "agent_hint"
TENANT_KEY = "tenant"
SESSION_ID_KEY = "session_id"
MAX_TENANT_LENGTH = 64
#: Longest JSON text of a hint; 16 edits and two ids of 256 characters fit well.
MAX_HINT_TEXT_LENGTH = 16 * 1024

#: Type and version under which a ``KvHintAction`` may carry our hint as its payload.
KV_HINT_ACTION_TYPE = "agent_hint"
KV_HINT_ACTION_VERSION = "1"


def hint_from_request(
    *,
    kv_transfer_params: Mapping[str, Any] | None,
    session_id: str | None,
    extra_args: Mapping[str, Any] | None,
    kv_hints: object | None = None,
) -> SessionHint | None:
    """What a request says about its session; ``None`` if it says nothing.

    Called once for each request on the scheduler's thread, so a request without a
    hint costs a few look-ups in small mappings.

    Args:
        kv_transfer_params: vLLM's ``Request.kv_transfer_params``.
        session_id: vLLM's ``Request.session_id``.
        extra_args: ``SamplingParams.extra_args``.
        kv_hints: vLLM's ``KvHintsEnvelope``, whose actions rank after all others.

    Raises:
        HintError: what it says is not valid.
    """
    wire, field, tenant = None, "", ""
    if kv_transfer_params and isinstance(kv_transfer_params, Mapping):
        wire = kv_transfer_params.get(HINT_KEY)
        if wire is not None:
            field = f"kv_transfer_params.{HINT_KEY}"
            wire, tenant = _take_tenant(wire, field)
    if not wire and extra_args:
        wire, field = extra_args.get(HINT_KEY), f"vllm_xargs.{HINT_KEY}"
    if not wire and kv_hints is not None:
        wire, field = next(_payloads(kv_hints), None), f"kv_hints.{HINT_KEY}"
    if not session_id and extra_args:
        candidate = extra_args.get(SESSION_ID_KEY)
        session_id = candidate if isinstance(candidate, str) else None
    if not wire and not session_id:
        return None
    return _lower(wire, field, session_id or None, tenant)


def _lower(
    wire: object, field: str, session_id: str | None, tenant: str
) -> SessionHint | None:
    if not wire:
        own_id = parse_session_id(session_id, field=SESSION_ID_KEY)
        return SessionHint(session=SessionKey(tenant, own_id))
    params = parse_agent_hint(decode_hint(wire, field), field_prefix=field)
    if params.session_id is None and session_id is not None:
        session_id = parse_session_id(session_id, field=SESSION_ID_KEY)
    return lower(params, tenant=tenant, session_id=session_id, field_prefix=field)


def decode_hint(wire: object, field: str) -> object:
    """``wire`` itself, or what its JSON text says; a claimed tenant is dropped.

    Raises:
        HintError: the text is no JSON, or too long.
    """
    if isinstance(wire, str):
        if len(wire) > MAX_HINT_TEXT_LENGTH:
            raise HintError(field, f"must have at most {MAX_HINT_TEXT_LENGTH} bytes")
        try:
            wire = json.loads(wire)
        except (ValueError, RecursionError):
            raise HintError(field, "must be an object or JSON text of one") from None
    if isinstance(wire, Mapping):
        return {key: value for key, value in wire.items() if key != TENANT_KEY}
    return wire


def _take_tenant(wire: object, field: str) -> tuple[object, str]:
    """Splits the tenant from the hint it travels with."""
    if not isinstance(wire, Mapping) or TENANT_KEY not in wire:
        return wire, ""
    tenant = wire[TENANT_KEY]
    if not isinstance(tenant, str) or len(tenant) > MAX_TENANT_LENGTH:
        raise HintError(f"{field}.{TENANT_KEY}", "must be a short string")
    rest = {key: value for key, value in wire.items() if key != TENANT_KEY}
    return rest or None, tenant


def _payloads(kv_hints: object) -> Iterator[Mapping[str, Any]]:
    """Hints among the actions of an envelope; other actions are other readers'.

    vLLM defines the envelope but no action of its own, so there is no word of its
    to translate: an orchestrator sends our hint as the payload of our own type.
    """
    for action in getattr(kv_hints, "actions", ()):
        if (
            action.action_type == KV_HINT_ACTION_TYPE
            and action.action_version == KV_HINT_ACTION_VERSION
        ):
            yield action.payload
