"""What known connectors offer beyond look-up, save and load.

A trait is a promise about a connector's behaviour that its interface does not tell.
Where nothing is known, nothing is promised: such a connector is passed through, and
gets sessions, tracking and confirmation by look-up, and neither keep-alive nor
prefetch.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Confirm(enum.StrEnum):
    """How it becomes known that a request's blocks are saved."""

    #: A look-up finds them. For connectors whose look-up sees only what is complete.
    LOOKUP = "lookup"
    #: A prompt is saved whole in the step that computes it, and the step waits for it.
    STEP = "step"


class Refresh(enum.StrEnum):
    """What makes a key live longer."""

    NONE = "none"
    #: Being looked up, as where the store moves what it is asked for up its LRU list.
    LOOKUP = "lookup"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorTraits:
    """What may be relied on.

    Attributes:
        confirm: how a save is confirmed.
        refresh: how a key is kept alive.
        whole_sequences: a key stands for a whole sequence and is found by no other;
            a load writes all of it, also over what the engine has already. Otherwise
            each block has a key, and a prefix is found.
        synthetic_load: it can be given a request that the engine does not have, and
            loads into the blocks it is given.
        synthetic_save: the same for saves: of a request whose blocks are all there.
        needs_whole_prompt: it saves a prompt right only if one step computes it all.
        tells_lora_apart: its keys depend on the adapter.
        tells_salt_apart: its keys depend on ``cache_salt``.
        supports_mla: synthetic loads and saves work for latent attention.
    """

    confirm: Confirm = Confirm.LOOKUP
    refresh: Refresh = Refresh.NONE
    whole_sequences: bool = False
    synthetic_load: bool = False
    synthetic_save: bool = False
    needs_whole_prompt: bool = False
    tells_lora_apart: bool = True
    tells_salt_apart: bool = True
    supports_mla: bool = True


#: Of a connector that nothing is known of.
UNKNOWN = ConnectorTraits()

_KNOWN: dict[str, ConnectorTraits] = {
    # Read and run: files named by a hash over all of a prompt's tokens and nothing
    # else. One request's chunked prompt makes a file that its load cannot use.
    "ExampleConnector": ConnectorTraits(
        confirm=Confirm.STEP,
        whole_sequences=True,
        synthetic_load=True,
        synthetic_save=True,
        needs_whole_prompt=True,
        tells_lora_apart=False,
        tells_salt_apart=False,
        supports_mla=False,
    ),
    # Not run here, for want of its hardware: see docs/wrapping-connectors.md.
    "AscendStoreConnector": ConnectorTraits(refresh=Refresh.LOOKUP),
}


def known_connectors() -> tuple[str, ...]:
    return tuple(sorted(_KNOWN))


def traits_of(
    connector: str, overrides: Mapping[str, Any]
) -> tuple[ConnectorTraits, list[str]]:
    """Traits of a connector by its name, some of them as the operator knows better.

    Args:
        connector: name of its class.
        overrides: by name of the trait.

    Returns:
        The traits, and what is wrong with the overrides.
    """
    traits, problems = _KNOWN.get(connector, UNKNOWN), []
    kinds = {spec.name: getattr(UNKNOWN, spec.name) for spec in _fields()}
    changes: dict[str, Any] = {}
    for name, value in overrides.items():
        if name not in kinds:
            known = ", ".join(sorted(kinds))
            problems.append(f"unknown trait {name!r}; known traits are {known}")
        elif isinstance(kinds[name], bool):
            if isinstance(value, bool):
                changes[name] = value
            else:
                problems.append(f"trait {name} must be true or false; got {value!r}")
        else:
            kind: type[enum.StrEnum] = type(kinds[name])
            if isinstance(value, str) and value in list(kind):
                changes[name] = kind(value)
            else:
                choices = ", ".join(kind)
                problems.append(f"trait {name} must be one of {choices}; got {value!r}")
    return dataclasses.replace(traits, **changes), problems


def _fields() -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(ConnectorTraits)
