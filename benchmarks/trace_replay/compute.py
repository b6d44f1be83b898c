"""The GPU in virtual time: prefill and decode share its steps.

A fluid model. A step decodes one token of every running request and takes as many
prompt tokens, first come, first served, as ``max_batched_tokens`` leaves room for. It
takes as long as its decoding plus its prefill. So a prefill delays every decoding
request by the time that its tokens take, and decoding slows a long prefill by one
decode step per chunk. Between two events nothing changes, so the time of the next one
is known without taking the steps one by one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.trace_replay.records import ServiceModel

#: Tokens and steps; work left that is less than this is rounding.
_EPSILON = 1e-6


@dataclass(slots=True, eq=False)
class Work:
    """A prefill or a decode under way, for ``cancel``.

    Attributes:
        left: prompt tokens to compute, or the number of the step that ends it.
        context_tokens: read by every step.
    """

    left: float
    then: Callable[[], None]
    context_tokens: int = 0


class Compute:
    """Prompts being prefilled and requests being decoded.

    Attributes:
        busy_directions: directions of the host link that are busy now.
    """

    def __init__(self, service: ServiceModel) -> None:
        self._service = service
        self.busy_directions = 0
        self._steps = 0.0
        self._context_tokens = 0
        self._decodes: list[tuple[float, int, Work]] = []
        self._prefills: deque[Work] = deque()
        self._sequence = itertools.count()

    @property
    def prefill_tokens(self) -> float:
        """Prompt tokens that are still to be computed."""
        return sum(prefill.left for prefill in self._prefills)

    @property
    def step_s(self) -> float:
        """How long a step takes that begins now."""
        if not self._decodes and not self._prefills:
            return self._service.idle_step_s
        num_tokens = min(self._chunk, self.prefill_tokens)
        return self._decode_s + num_tokens / self._service.prefill_tokens_per_s

    def prefill(self, num_tokens: int, then: Callable[[], None]) -> Work:
        """Calls ``then`` once ``num_tokens`` more prompt tokens are computed."""
        work = Work(num_tokens, then)
        self._prefills.append(work)
        return work

    def decode(
        self, num_steps: int, then: Callable[[], None], *, context_tokens: int
    ) -> Work:
        """Calls ``then`` after ``num_steps`` further steps."""
        work = Work(self._steps + num_steps, then, context_tokens)
        heapq.heappush(self._decodes, (work.left, next(self._sequence), work))
        self._context_tokens += context_tokens
        return work

    def cancel(self, work: Work) -> None:
        """It is not done, and ``then`` not called."""
        if work in self._prefills:
            self._prefills.remove(work)
            return
        self._decodes = [entry for entry in self._decodes if entry[2] is not work]
        heapq.heapify(self._decodes)
        self._context_tokens -= work.context_tokens

    def time_to_next(self) -> float:
        """Seconds until ``take_due`` has something, if nothing changes."""
        if not self._decodes and not self._prefills:
            return math.inf
        return self._steps_to_next * self._full_step_s

    def advance(self, elapsed_s: float, *, is_next: bool) -> None:
        """Time has gone by.

        Args:
            elapsed_s: no more than ``time_to_next`` said.
            is_next: it was as much; to be told, since the clock rounds.
        """
        if not self._decodes and not self._prefills:
            return
        num_steps = elapsed_s / self._full_step_s if self._full_step_s else 0.0
        if is_next:
            num_steps = self._steps_to_next
        if self._prefills:
            self._prefills[0].left -= num_steps * self._chunk
        self._steps += num_steps

    def take_due(self) -> list[Callable[[], None]]:
        """What has been reached by now."""
        due = []
        while self._prefills and self._prefills[0].left <= _EPSILON:
            due.append(self._prefills.popleft().then)
        reached = self._steps + _EPSILON
        while self._decodes and self._decodes[0][0] <= reached:
            _, _, work = heapq.heappop(self._decodes)
            self._context_tokens -= work.context_tokens
            due.append(work.then)
        return due

    @property
    def _steps_to_next(self) -> float:
        steps = math.inf
        if self._decodes:
            steps = max(0.0, self._decodes[0][0] - self._steps)
        if self._prefills:
            steps = min(steps, max(0.0, self._prefills[0].left) / self._chunk)
        return steps

    @property
    def _full_step_s(self) -> float:
        """A step that prefills as much as fits, which is what rates are made of: with
        less to do it takes less time and does less, at the same rate."""
        return self._decode_s + self._chunk / self._service.prefill_tokens_per_s

    @property
    def _chunk(self) -> float:
        if not self._prefills:
            return 0.0
        return max(1.0, self._service.max_batched_tokens - len(self._decodes))

    @property
    def _decode_s(self) -> float:
        if not self._decodes:
            return 0.0
        service = self._service
        decode_s = (
            service.decode_step_s
            + (len(self._decodes) - 1) * service.decode_request_s
            + self._context_tokens * service.decode_context_token_s
        )
        return decode_s * (1 + service.copy_slowdown * self.busy_directions)
