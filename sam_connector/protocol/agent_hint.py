"""``agent_hint`` as clients write it (RFC section 1), and its lowering.

The models are strict: a string is no number, ``true`` is no number, and a name
that is not listed here is an error, because a silently ignored ``ttl_s`` costs its
author a cache. So that a client may talk to older servers, names that begin with
``x_`` are ignored at every level; a field added later can travel under such a name
until every server knows it.

Bounds of everything a client can send stand in the constants below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from sam_connector.core.types import Edit, EditType, SessionHint, SessionKey
from sam_connector.errors import HintError

MAX_SESSION_ID_LENGTH = 256
MAX_TTL_S = 3600.0
DEFAULT_TTL_S = 300.0
MAX_EDITS = 16
#: Larger than any context; keeps what reaches the engine an ordinary integer.
MAX_BLOCK_INDEX = 2**31 - 1

_EXTENSION_PREFIX = "x_"
_MAX_NAME_IN_MESSAGE = 64


def check_session_id(value: str) -> str:
    """``value`` if it may name a session.

    Raises:
        ValueError: with the reason, for a client.
    """
    if not 1 <= len(value) <= MAX_SESSION_ID_LENGTH:
        raise ValueError(f"must have 1 to {MAX_SESSION_ID_LENGTH} characters")
    # Lone surrogates are not printable either, so the id can always be encoded.
    if not value.isprintable():
        raise ValueError("must contain printable characters only")
    return value


SessionId = Annotated[str, AfterValidator(check_session_id)]
BlockIndex = Annotated[int, Field(ge=0, le=MAX_BLOCK_INDEX)]
Seconds = Annotated[float, Field(ge=0, le=MAX_TTL_S, allow_inf_nan=False)]


def encodable(name: str) -> str:
    """A client's own word, cut and escaped so that any reply can carry it."""
    return (
        name[:_MAX_NAME_IN_MESSAGE]
        .encode("utf-8", errors="backslashreplace")
        .decode("utf-8")
    )


class _WireModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _only_known_names(cls, data: Any) -> Any:
        """Stops at the first unknown name, however many there are."""
        if not isinstance(data, Mapping):
            return data
        known = {}
        for name, value in data.items():
            if name in cls.model_fields:
                known[name] = value
            elif not (isinstance(name, str) and name.startswith(_EXTENSION_PREFIX)):
                raise PydanticCustomError(
                    "unknown_field", "unknown field", {"name": encodable(str(name))}
                )
        return known


class CacheControlParams(_WireModel):
    """How long the context is worth keeping once the request has completed."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Seconds = DEFAULT_TTL_S
    block_offset: BlockIndex | None = None


class ContextEdit(_WireModel):
    """One operation on the context, or on a half-open range of its blocks."""

    type: Literal["offload", "prefetch", "evict"]
    block_start: BlockIndex | None = None
    block_end: BlockIndex | None = None
    purge: bool = False

    @model_validator(mode="after")
    def _range_is_whole(self) -> Self:
        if self.purge and self.type != "evict":
            raise PydanticCustomError(
                "not_an_evict", "is for evict only", {"name": "purge"}
            )
        start, end = self.block_start, self.block_end
        if (start is None) != (end is None):
            given, absent = (
                ("block_end", "block_start")
                if start is None
                else ("block_start", "block_end")
            )
            raise PydanticCustomError(
                "half_range",
                "is required with {given}",
                {"name": absent, "given": given},
            )
        if start is not None and end is not None and start >= end:
            raise PydanticCustomError(
                "empty_range", "must be greater than block_start", {"name": "block_end"}
            )
        return self

    def lower(self) -> Edit:
        return Edit(
            type=EditType(self.type),
            block_start=self.block_start,
            block_end=self.block_end,
            purge=self.purge,
        )


class ContextManagementParams(_WireModel):
    """Operations to run, at once (``manage_request``) or at completion."""

    manage_request: bool = False
    edits: list[ContextEdit] = Field(default_factory=list, max_length=MAX_EDITS)


class AgentHintParams(_WireModel):
    """The whole hint."""

    session_id: SessionId | None = None
    parent_session_id: SessionId | None = None
    cache_control: CacheControlParams | None = None
    expected_resume_s: Seconds | None = None
    context_management: ContextManagementParams | None = None

    @property
    def manage_request(self) -> bool:
        management = self.context_management
        return management is not None and management.manage_request

    @property
    def edits(self) -> tuple[Edit, ...]:
        if self.context_management is None:
            return ()
        return tuple(edit.lower() for edit in self.context_management.edits)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is said that needs a session to say it about."""
        return (
            self.parent_session_id is None
            and self.cache_control is None
            and self.expected_resume_s is None
            and not self.manage_request
            and not self.edits
        )


def parse_agent_hint(
    obj: object, *, field_prefix: str = "agent_hint"
) -> AgentHintParams:
    """Validates the wire form.

    Args:
        obj: what JSON decoding gave.
        field_prefix: where the hint stood in the request, for messages.

    Raises:
        HintError: names the first field that is wrong.
    """
    try:
        return AgentHintParams.model_validate(obj)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        raise HintError(_field(field_prefix, details), _message(details)) from None


def parse_edits(obj: object, *, field: str = "edits") -> tuple[Edit, ...]:
    """Validates a list of edits that stands by itself.

    Raises:
        HintError: names the first field that is wrong.
    """
    if not isinstance(obj, list):
        raise HintError(field, "must be a list")
    try:
        return AgentHintParams.model_validate(
            {"context_management": {"edits": obj}}
        ).edits
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        details["loc"] = details["loc"][2:]
        raise HintError(_field(field, details), _message(details)) from None


def parse_ttl(obj: object, *, field: str = "ttl") -> float:
    """Validates a retention time that stands by itself.

    Raises:
        HintError: it is not a number of seconds within the bounds.
    """
    try:
        return CacheControlParams.model_validate({"ttl": obj}).ttl
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        raise HintError(field, _message(details)) from None


def parse_expected_resume(
    obj: object, *, field: str = "expected_resume_s"
) -> float | None:
    """Validates an expectation that stands by itself; ``None`` says nothing.

    Raises:
        HintError: it is not a number of seconds within the bounds.
    """
    try:
        return AgentHintParams.model_validate(
            {"expected_resume_s": obj}
        ).expected_resume_s
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        raise HintError(field, _message(details)) from None


def parse_session_id(obj: object, *, field: str) -> str:
    """Validates a session id that stands by itself.

    Raises:
        HintError: it is not 1 to 256 printable characters.
    """
    if not isinstance(obj, str):
        raise HintError(field, "must be a string")
    try:
        return check_session_id(obj)
    except ValueError as error:
        raise HintError(field, str(error)) from None


def lower(
    params: AgentHintParams,
    *,
    tenant: str,
    session_id: str | None = None,
    field_prefix: str = "agent_hint",
) -> SessionHint | None:
    """The hint in the words of the core.

    Args:
        params: the validated wire form.
        tenant: whose sessions are meant.
        session_id: the id the request gives outside the hint, used if the hint
            itself has none; already validated.
        field_prefix: where the hint stood in the request, for messages.

    Returns:
        ``None`` if the hint says nothing and no session is named.

    Raises:
        HintError: something is asked for but no session is named, or the session
            is its own parent.
    """
    own_id = params.session_id if params.session_id is not None else session_id
    if own_id is None:
        if params.is_empty:
            return None
        raise HintError(f"{field_prefix}.session_id", "is required")
    parent_id = params.parent_session_id
    if parent_id == own_id:
        raise HintError(
            f"{field_prefix}.parent_session_id", "must differ from session_id"
        )
    control = params.cache_control
    return SessionHint(
        session=SessionKey(tenant, own_id),
        parent=None if parent_id is None else SessionKey(tenant, parent_id),
        ttl_s=None if control is None else control.ttl,
        protect_blocks=None if control is None else control.block_offset,
        edits=params.edits,
        expected_resume_s=params.expected_resume_s,
    )


def _field(prefix: str, details: ErrorDetails) -> str:
    path = [prefix, *details["loc"]]
    name = details.get("ctx", {}).get("name")
    if name is not None:
        path.append(name)
    return ".".join(encodable(str(part)) for part in path)


#: Our own words: pydantic's name classes of ours in some of its messages.
_MESSAGES = {
    "missing": "is required",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "string_type": "must be a string",
    # A lone surrogate is refused while pydantic still decodes the string.
    "string_unicode": "must contain printable characters only",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "int_parsing_size": "must be a smaller integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "list_type": "must be a list",
    "too_long": "must have at most {max_length} items",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:.10g}",
    "literal_error": "must be {expected}",
    "value_error": "{error}",
    "unknown_field": "unknown field",
    "half_range": "is required with {given}",
    "empty_range": "must be greater than block_start",
    "not_an_evict": "is for evict only",
}


def _message(details: ErrorDetails) -> str:
    template = _MESSAGES.get(details["type"], "is not valid")
    return template.format(**details.get("ctx", {}))
