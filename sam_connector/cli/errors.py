"""How a command tells its user that it cannot go on."""

from __future__ import annotations

from sam_connector.errors import SamError


class CommandError(SamError):
    """The command failed; the message is for the person who typed it."""
