"""Reading a request's body ahead of the application, and handing it on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

# Expressions, because they search a body of this size faster than ``in`` does.
_NAME = re.compile(rb"agent_hint")
# JSON may spell any letter of the name as an escape, and a body in UTF-16 or
# UTF-32 has NUL bytes between its letters; no honest encoder does either.
_ESCAPED_LETTER = re.compile(rb"\\u00(?:5[fF]|[67][0-9a-fA-F])")
_OVERLAP = len(b"agent_hint")

TOO_LARGE = "a request with agent_hint must have at most {limit} bytes"


def mentions_hint(body: bytes) -> bool:
    """Whether the JSON in ``body`` can contain the name at all: cheap, no parsing."""
    return (
        b"\0" in body
        or _NAME.search(body) is not None
        or _ESCAPED_LETTER.search(body) is not None
    )


@dataclass(frozen=True, slots=True)
class ReceivedBody:
    """What was read.

    Attributes:
        body: the bytes so far.
        more_body: whether the client has more to send.
        departure: the message that said so, if the client left meanwhile.
        is_too_large: whether the limit was passed.
    """

    body: bytes
    more_body: bool = False
    departure: Message | None = None
    is_too_large: bool = False

    def replay(self, receive: Receive, body: bytes | None = None) -> Receive:
        """A ``receive`` that hands on what was read, then the original's messages.

        Args:
            receive: the original; asked only once what was read is handed on, so
                that a later disconnect reaches the application.
            body: stands in for what was read.
        """
        messages: list[Message] = [
            {
                "type": "http.request",
                "body": self.body if body is None else body,
                "more_body": self.more_body,
            }
        ]
        if self.departure is not None:
            messages.append(self.departure)
        messages.reverse()

        async def replayed() -> Message:
            return messages.pop() if messages else await receive()

        return replayed


async def read_body(receive: Receive, limit: int) -> ReceivedBody:
    """Reads the body, or a little more than ``limit`` bytes of it."""
    chunks: list[bytes] = []
    num_bytes = 0
    more_body = True
    while more_body and num_bytes <= limit:
        message = await receive()
        if message["type"] != "http.request":
            return ReceivedBody(b"".join(chunks), more_body=True, departure=message)
        chunk = message.get("body", b"")
        chunks.append(chunk)
        num_bytes += len(chunk)
        more_body = message.get("more_body", False)
    return ReceivedBody(
        b"".join(chunks), more_body=more_body, is_too_large=num_bytes > limit
    )


def watched(receive: Receive, head: bytes, limit: int) -> Receive:
    """A ``receive`` for the rest of a body too large to look into.

    It goes on to the application as it comes, as without us, but a hint in it would
    go on unchecked: then the request ends there, with an error that FastAPI renders.
    """
    tail = head[-_OVERLAP:]

    async def watching() -> Message:
        nonlocal tail
        message = await receive()
        chunk = message.get("body", b"")
        if mentions_hint(tail + chunk):
            raise HTTPException(413, TOO_LARGE.format(limit=limit))
        tail = (tail + chunk)[-_OVERLAP:]
        return message

    return watching
