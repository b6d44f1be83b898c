"""Every exception this package raises on purpose, in one tree.

    SamError
     ├── ConfigurationError     server start: bad ``kv_connector_extra_config``
     ├── IncompatibleEngineError server start: this vLLM is not one we support
     ├── HintError              one request: a hint that fails validation (HTTP 400)
     ├── StoreError             store I/O; returned as a value, never raised at a client
     │    ├── StoreUnavailable   refused, cut, loading, read-only, breaker open
     │    ├── StoreTimeout       no answer by the deadline
     │    ├── StoreFull          no room for what was to be written
     │    └── StoreDenied        wrong password or no permission; an operator must act
     └── IntegrityError         tests and debug: a data structure contradicts itself

Nothing below may reach vLLM's scheduler loop: a bad hint there is counted and
dropped, never raised.
"""

from __future__ import annotations

from collections.abc import Sequence


class SamError(Exception):
    """Base class: ``except SamError`` catches everything raised here."""


class ConfigurationError(SamError):
    """The connector's configuration is wrong; lists *all* problems at once.

    Args:
        problems: one human-readable line per problem, in the order found.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("invalid sam-connector configuration: " + "; ".join(problems))


class IncompatibleEngineError(SamError):
    """The installed vLLM lacks something the connector cannot do without."""


class HintError(SamError, ValueError):
    """A hint failed validation.

    Args:
        field: dotted path of the offending field, e.g. ``agent_hint.session_id``.
        message: what is wrong with it, for the client.
    """

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        self.message = message
        super().__init__(f"{field}: {message}")


class StoreError(SamError):
    """A store did not do as asked; the message never contains a password."""


class StoreUnavailable(StoreError):
    """There is no server, it broke off, or it is not in a state to serve."""


class StoreTimeout(StoreError):
    """The deadline passed before the store answered."""


class StoreFull(StoreError):
    """The store is at its memory limit and takes nothing more."""


class StoreDenied(StoreError):
    """The store refuses us: credentials or permissions are wrong."""


class IntegrityError(SamError, AssertionError):
    """``check_integrity()`` found a contradiction."""
