"""The call into the engine processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from sam_connector.protocol.control import (
    ApplyEdits,
    Command,
    FailureCode,
    Reply,
    failure,
)
from sam_connector.protocol.merging import merge_replies

logger = logging.getLogger(__name__)

#: The method that our plug-in gives to vLLM's ``EngineCore``.
UTILITY_NAME = "sam_control"
#: How long an engine may take beyond the wait that a command itself asks for; a
#: step of a busy engine, during which it answers nothing, is far shorter.
DEFAULT_MARGIN_S = 10.0


class EngineCoreClient(Protocol):
    """What is used of vLLM's ``AsyncMPClient``.

    Clients of several engines also have ``call_utility_all_async``, which returns
    one answer from each; their ``call_utility_async`` drops all answers but one.
    """

    async def call_utility_async(self, method: str, *args: Any) -> Any: ...


class EngineControl:
    """Sends commands to every engine of this server and merges the replies.

    Args:
        engine_core: gives the client, or ``None`` while there is none.
        margin_s: vLLM's own calls wait for ever; this bounds them.
    """

    def __init__(
        self,
        engine_core: Callable[[], EngineCoreClient | None],
        *,
        margin_s: float = DEFAULT_MARGIN_S,
    ) -> None:
        self._engine_core = engine_core
        self._margin_s = margin_s

    async def call(self, command: Command) -> Reply:
        """Carries out ``command``; whatever goes wrong is a reply, not an exception."""
        wait_s = command.wait_s if isinstance(command, ApplyEdits) else 0.0
        try:
            async with asyncio.timeout(wait_s + self._margin_s):
                answers = await self._call_all(command.encode())
            return merge_replies(answers, command=command)
        except TimeoutError:
            return _unavailable("the engine did not answer in time")
        except Exception as error:
            logger.warning("control call %r failed: %s", command.op, error)
            if UTILITY_NAME in str(error):
                return _unavailable(
                    "the engine has no session control: "
                    "is it started with the SAMConnector?"
                )
            return _unavailable("the engine could not be asked")

    async def _call_all(self, payload: str) -> list[Any]:
        engine_core = self._engine_core()
        if engine_core is None:
            raise RuntimeError("this server has no engine")
        call_all = getattr(engine_core, "call_utility_all_async", None)
        if call_all is not None:
            return list(await call_all(UTILITY_NAME, payload))
        return [await engine_core.call_utility_async(UTILITY_NAME, payload)]


def _unavailable(reason: str) -> Reply:
    return failure(FailureCode.UNAVAILABLE, reason)
