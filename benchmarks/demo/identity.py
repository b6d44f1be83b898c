"""Does anything change tokens? The same requests, one at a time, on every server.

One at a time, because what shares a batch changes floating-point sums and with them
tokens on any server. The pool is far smaller than what these requests hold
together, so blocks are evicted and reused all the time, and on our servers copied to
host memory and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.demo.client import Completion, DemoClient
from benchmarks.demo.harness import Harness
from benchmarks.demo.policy import resumptions
from benchmarks.demo.workload import Turn, Workload

#: The trace's own outputs are a few tokens once scaled; more tokens compare more.
NUM_OUTPUT_TOKENS = 12
_PROGRESS_PERIOD = 10


@dataclass(kw_only=True)
class IdentityRecord:
    """What one server generated.

    Attributes:
        tokens: generated token ids by turn index.
        cached_tokens: prompt tokens that came from a cache.
        loaded_bytes: copied from host memory meanwhile.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    loaded_bytes: int = 0


async def generate_one_by_one(
    client: DemoClient,
    workload: Workload,
    turns: Sequence[Turn],
    *,
    harness: Harness,
    report: Callable[[str], None],
) -> IdentityRecord:
    """Generate for each turn, and first bring about what the turns build on."""

    async def generate(turn: Turn) -> tuple[list[int], Completion]:
        await harness.on_ready(turn)
        answer = await client.generate(
            workload.prompt(turn), NUM_OUTPUT_TOKENS, harness.hint(turn)
        )
        await harness.on_answer(turn)
        return answer

    for turn in begun_before(workload, turns):
        await generate(turn)
    record = IdentityRecord()
    for turn in turns:
        record.tokens[turn.index], done = await generate(turn)
        record.prompt_tokens += done.prompt_tokens
        record.cached_tokens += done.cached_tokens
        if len(record.tokens) % _PROGRESS_PERIOD == 0:
            report(
                f"identity {len(record.tokens)}/{len(turns)}, "
                f"{record.cached_tokens} tokens from cache"
            )
    return record


def begun_before(workload: Workload, turns: Sequence[Turn]) -> list[Turn]:
    """The turns after which agents wait for children and resume among ``turns``.

    Without them those agents would have no context to come back to.
    """
    given = {turn.index for turn in turns}
    since = {
        begun
        for resumed, begun in resumptions(workload.turns).items()
        if resumed in given
    }
    return [workload.turns[index] for index in sorted(since - given)]


def identical(records: Iterable[IdentityRecord]) -> list[bool]:
    """For each turn, whether all servers generated the same tokens."""
    tokens = [record.tokens for record in records]
    if not tokens:
        return []
    first, *others = tokens
    assert all(other.keys() == first.keys() for other in others)
    return [all(other[i] == first[i] for other in others) for i in first]
