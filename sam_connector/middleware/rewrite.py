"""What happens to a body that carries a hint: validated, lowered, taken out.

Pure: bytes in, bytes or a management request out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sam_connector.core.types import SessionHint
from sam_connector.errors import HintError
from sam_connector.middleware.endpoints import Dialect, Endpoint
from sam_connector.protocol.agent_hint import (
    AgentHintParams,
    encodable,
    lower,
    parse_agent_hint,
    parse_session_id,
)
from sam_connector.protocol.lowering import (
    HINT_KEY,
    SESSION_ID_KEY,
    TENANT_KEY,
    decode_hint,
)

KV_PARAMS_KEY = "kv_transfer_params"
XARGS_KEY = "vllm_xargs"

#: Names from the top of the body that a message repeats at most.
_MAX_PATH_LENGTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedRequest:
    """A request that asks for management and no model execution."""

    hint: SessionHint
    model: str | None
    stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """A body in which the hint has moved to where the engine finds it."""

    body: bytes


def rewrite(
    raw: bytes, *, endpoint: Endpoint, session_header: str | None, tenant: str
) -> Rewritten | ManagedRequest | None:
    """Looks into a body.

    Args:
        raw: the body.
        endpoint: where it goes.
        session_header: the value of ``X-Session-ID``.
        tenant: whose sessions are meant; what the body says of it is replaced.

    Returns:
        ``None`` if the body must go on as it is: it has no hint after all, or vLLM
        itself will refuse it and word the error.

    Raises:
        HintError: the hint is not valid.
    """
    try:
        return _rewrite(raw, endpoint, session_header, tenant)
    except RecursionError:
        raise HintError("body", "is nested too deeply") from None


def _rewrite(
    raw: bytes, endpoint: Endpoint, session_header: str | None, tenant: str
) -> Rewritten | ManagedRequest | None:
    try:
        payload = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(payload, dict):
        return None
    if endpoint.dialect is Dialect.CARRIER:
        _claim(payload, tenant)
        return Rewritten(body=json.dumps(payload).encode())
    # All four request models refuse these; other routes know fewer fields.
    if not _is_well_typed(payload):
        return None
    native = _NativeSession.of(payload, endpoint, session_header)
    found = list(_take_hints(payload))
    if not found and not (tenant and native.value):
        return None
    hints = [(wire, field) for wire, field in found if wire is not None]
    if not hints:
        if tenant and native.value:
            _claim(payload, tenant)
        return Rewritten(body=json.dumps(payload).encode())
    wire, field = hints[0]
    params = parse_agent_hint(decode_hint(wire, field), field_prefix=field)
    hint = _lower(params, field, tenant, native)
    if hint is not None:
        _place(payload, params, hint, endpoint)
    body = _encode(payload)
    if hint is not None and params.manage_request:
        return _managed(payload, hint)
    return Rewritten(body=body)


def _is_well_typed(payload: dict[str, Any]) -> bool:
    return all(
        isinstance(payload.get(key), dict | None) for key in (KV_PARAMS_KEY, XARGS_KEY)
    )


@dataclass(frozen=True, slots=True)
class _NativeSession:
    """The session id that vLLM itself would read, and where it stood."""

    value: str | None
    field: str

    @classmethod
    def of(
        cls, payload: dict[str, Any], endpoint: Endpoint, header: str | None
    ) -> _NativeSession:
        candidates = [
            (header, "X-Session-ID"),
            (
                (payload.get(XARGS_KEY) or {}).get(SESSION_ID_KEY),
                f"{XARGS_KEY}.{SESSION_ID_KEY}",
            ),
        ]
        if endpoint.has_session_id:
            candidates.insert(0, (payload.get(SESSION_ID_KEY), SESSION_ID_KEY))
        for value, field in candidates:
            if isinstance(value, str) and value:
                return cls(value, field)
        return cls(None, SESSION_ID_KEY)


def _take_hints(payload: dict[str, Any]) -> Iterator[tuple[object, str]]:
    """Takes every hint out of the body, the one that counts first."""
    if HINT_KEY in payload:
        yield payload.pop(HINT_KEY), HINT_KEY
    for key in (KV_PARAMS_KEY, XARGS_KEY):
        holder = payload.get(key)
        if holder and HINT_KEY in holder:
            yield holder.pop(HINT_KEY), f"{key}.{HINT_KEY}"


def _lower(
    params: AgentHintParams, field: str, tenant: str, native: _NativeSession
) -> SessionHint | None:
    session_id = native.value
    if params.session_id is None and session_id is not None:
        session_id = parse_session_id(session_id, field=native.field)
    return lower(params, tenant=tenant, session_id=session_id, field_prefix=field)


def _place(
    payload: dict[str, Any],
    params: AgentHintParams,
    hint: SessionHint,
    endpoint: Endpoint,
) -> None:
    session_id = hint.session.session_id
    wire = params.model_dump(exclude_none=True)
    wire[SESSION_ID_KEY] = session_id
    if hint.session.tenant:
        wire[TENANT_KEY] = hint.session.tenant
    payload[KV_PARAMS_KEY] = (payload.get(KV_PARAMS_KEY) or {}) | {HINT_KEY: wire}
    if endpoint.has_session_id:
        payload[SESSION_ID_KEY] = session_id
    else:
        xargs = payload.get(XARGS_KEY) or {}
        payload[XARGS_KEY] = xargs | {SESSION_ID_KEY: session_id}


def _claim(payload: dict[str, Any], tenant: str) -> None:
    """Says the tenant wherever the engine might read it from this body."""
    sampling_params = payload.get("sampling_params")
    holders = [payload]
    if isinstance(sampling_params, dict):
        extra_args = sampling_params.get("extra_args")
        if isinstance(extra_args, dict) and KV_PARAMS_KEY in extra_args:
            holders.append(extra_args)
    for holder in holders:
        kv_params = holder.get(KV_PARAMS_KEY)
        if not isinstance(kv_params, dict | None):
            continue
        kv_params = holder[KV_PARAMS_KEY] = kv_params or {}
        wire = kv_params.get(HINT_KEY)
        if isinstance(wire, dict | None):
            kv_params[HINT_KEY] = (wire or {}) | {TENANT_KEY: tenant}


def _managed(payload: dict[str, Any], hint: SessionHint) -> ManagedRequest:
    model = payload.get("model")
    return ManagedRequest(
        hint=hint,
        model=model if isinstance(model, str) else None,
        stream=payload.get("stream") is True,
    )


def _encode(payload: dict[str, Any]) -> bytes:
    try:
        return json.dumps(payload, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        path = ".".join(_path_to_surrogate(payload))
        raise HintError(path, "must not contain lone surrogates") from None


def _path_to_surrogate(payload: dict[str, Any]) -> list[str]:
    """Where a string that cannot be encoded stands; it walks without recursion."""
    waiting: list[tuple[tuple[Any, str] | None, object]] = [(None, payload)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str) and not _is_encodable(value):
            return _names(path)
        children: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict):
            children = value.items()
        elif isinstance(value, list):
            children = enumerate(value)
        for key, child in children:
            here = (path, str(key))
            if not _is_encodable(here[1]):
                return _names(here)
            waiting.append((here, child))
    raise AssertionError("every string can be encoded")


def _names(path: tuple[Any, str] | None) -> list[str]:
    names = []
    while path is not None:
        path, name = path
        names.append(encodable(name))
    return names[-_MAX_PATH_LENGTH:][::-1]


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
