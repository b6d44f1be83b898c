"""Tokens do not depend on hints: ours in a small pool against a stock server.

Requests go one at a time, because batches alone change the last bits of a result.
``SAM_FUZZ_REQUESTS`` sets how many the random test sends, ``SAM_FUZZ_SEED`` which.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.live.endpoints import session_path
from tests.live.server import LiveServer, cached_tokens

NUM_FUZZ_REQUESTS = int(os.environ.get("SAM_FUZZ_REQUESTS", "150"))
FUZZ_SEED = int(os.environ.get("SAM_FUZZ_SEED", "7"))
#: Far above the noise of equal blocks, far below the effect of a wrong one.
TOLERANCE = 1e-3
MAX_CONTEXT = 900
VOCABULARY = range(100, 1000)
MAX_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Output:
    """What a model answered, and how sure it was."""

    tokens: list[int]
    logprobs: list[float]
    margins: list[float]


def ask(
    server: LiveServer, prompt: list[int], hint: Mapping[str, object] | None = None
) -> Output:
    answer = server.complete(
        prompt,
        max_tokens=MAX_TOKENS,
        hint=hint,
        logprobs=2,
        # By text, two tokens that print alike would be one entry.
        return_tokens_as_token_ids=True,
    )
    return _output_of(answer)


def _output_of(answer: Mapping[str, Any]) -> Output:
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    margins = []
    for top in logprobs["top_logprobs"]:
        first, second = sorted(top.values(), reverse=True)[:2]
        margins.append(first - second)
    return Output(choice["token_ids"], logprobs["token_logprobs"], margins)


def assert_same_output(ours: Output, stock: Output) -> None:
    """Equal up to the first near-tie, after which the two may go different ways."""
    assert len(ours.tokens) == len(stock.tokens)
    for position, expected in enumerate(stock.tokens):
        difference = abs(ours.logprobs[position] - stock.logprobs[position])
        assert difference < TOLERANCE, (ours, stock)
        if ours.tokens[position] != expected:
            assert stock.margins[position] < TOLERANCE, (ours, stock)
            return


def test_comparison_notices_one_foreign_token(stock_server: LiveServer) -> None:
    prompt = list(VOCABULARY)
    expected = ask(stock_server, prompt)
    assert_same_output(expected, expected)
    prompt[3] += 1
    with pytest.raises(AssertionError):
        assert_same_output(ask(stock_server, prompt), expected)


# --- turns of agents ------------------------------------------------------------------


def test_agents_under_pressure_get_the_tokens_of_stock(
    small_server: LiveServer, stock_server: LiveServer
) -> None:
    """Four agents with one system prompt take turns in a pool for two of them."""
    small_server.reset_prefix_cache()
    system = list(VOCABULARY)[:160]
    contexts = [system + [300 + agent] * 40 for agent in range(4)]
    before = small_server.stats()
    num_cached = 0
    for turn in range(6):
        for agent, context in enumerate(contexts):
            hint: dict[str, object] = {"session_id": f"agent-{agent}"}
            hint["cache_control"] = {"ttl": 60 if agent else 0}
            if agent == 3 and turn % 2:
                hint["context_management"] = {"edits": [{"type": "evict"}]}
            ours = small_server.complete(context, max_tokens=MAX_TOKENS, hint=hint)
            stock = stock_server.complete(context, max_tokens=MAX_TOKENS)
            tokens = ours["choices"][0]["token_ids"]
            assert tokens == stock["choices"][0]["token_ids"]
            num_cached += cached_tokens(ours)
            context += tokens + [(turn * 97 + agent * 31 + n) % 800 for n in range(90)]
    assert num_cached > 0
    assert _num_broken(small_server.stats()) > _num_broken(before)


def _num_broken(stats: Mapping[str, int]) -> int:
    """Held blocks that were handed out to somebody else."""
    return stats["leases_broken"] + stats["claims_broken"]


# --- random requests ------------------------------------------------------------------


@dataclass(slots=True)
class Fuzzer:
    """Conversations that share prefixes, grow, rewind and branch, with random hints."""

    random: random.Random
    prefixes: list[list[int]] = field(init=False)
    contexts: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = (40, 96, 200)
        self.prefixes = [self._tokens(length) for length in lengths]

    def next_request(self) -> tuple[list[int], dict[str, object] | None]:
        name = f"s-{self.random.randrange(12)}"
        context = self.contexts.get(name)
        if context is None or len(context) > MAX_CONTEXT or self._chance(0.05):
            context = list(self.random.choice(self.prefixes))
        elif self._chance(0.15):
            context = context[: self.random.randrange(1, len(context))]
        context = context + self._tokens(self.random.randrange(1, 120))
        if self._chance(0.15):
            # A side call under the same id leaves the conversation where it is.
            return self._tokens(self.random.randrange(1, 80)), self._hint(name)
        self.contexts[name] = context
        return context, self._hint(name) if self._chance(0.85) else None

    def disturb(self, server: LiveServer) -> None:
        """Now and then a control call, on any session."""
        path = session_path(f"s-{self.random.randrange(12)}")
        choice = self.random.randrange(12)
        if choice == 0:
            server.post(f"{path}/edits", {"edits": self._edits()})
        elif choice == 1:
            server.put(f"{path}/lease", {"ttl": self._ttl()})
        elif choice == 2:
            server.delete(f"{path}?tree=true")
        elif choice == 3 and self._chance(0.2):
            server.reset_prefix_cache()
        elif choice == 4 and self._chance(0.2):
            server.post("/v1/agent/reset")

    def _hint(self, name: str) -> dict[str, object]:
        hint: dict[str, object] = {"session_id": name}
        if self._chance(0.3):
            parent = f"s-{self.random.randrange(12)}"
            if parent != name:
                hint["parent_session_id"] = parent
        if self._chance(0.7):
            hint["cache_control"] = {"ttl": self._ttl()}
        if self._chance(0.25):
            hint["context_management"] = {"edits": self._edits()}
        return hint

    def _edits(self) -> list[dict[str, object]]:
        edits: list[dict[str, object]] = []
        for _ in range(self.random.randrange(1, 4)):
            kinds = ["evict", "evict", "offload", "prefetch"]
            edit: dict[str, object] = {"type": self.random.choice(kinds)}
            if self._chance(0.2):
                start = self.random.randrange(8)
                edit |= {"block_start": start, "block_end": start + 4}
            edits.append(edit)
        return edits

    def _ttl(self) -> float:
        return self.random.choice([0, 0.05, 1, 30, 3600])

    def _tokens(self, number: int) -> list[int]:
        return self.random.choices(VOCABULARY, k=number)

    def _chance(self, probability: float) -> bool:
        return self.random.random() < probability


@pytest.mark.timeout(300 + 4 * NUM_FUZZ_REQUESTS)
def test_m09_random_requests_get_the_tokens_of_stock(
    small_server: LiveServer, stock_server: LiveServer
) -> None:
    fuzzer = Fuzzer(random.Random(FUZZ_SEED))
    before = small_server.stats()
    for _ in range(NUM_FUZZ_REQUESTS):
        prompt, hint = fuzzer.next_request()
        ours = ask(small_server, prompt, hint)
        assert_same_output(ours, ask(stock_server, prompt))
        fuzzer.disturb(small_server)
    after = small_server.stats()
    assert _num_broken(after) > _num_broken(before)
    assert after["internal_errors"] == after["invalid_hints"] == 0


@pytest.mark.timeout(300 + 2 * NUM_FUZZ_REQUESTS)
def test_m09_random_requests_at_the_same_time_get_the_tokens_of_stock(
    small_server: LiveServer, stock_server: LiveServer
) -> None:
    """Batches change the last bits only, so near-ties aside tokens are equal too."""
    fuzzer = Fuzzer(random.Random(FUZZ_SEED + 1))
    width = 5
    with ThreadPoolExecutor(width) as pool:
        for _ in range(max(1, NUM_FUZZ_REQUESTS // (3 * width))):
            requests = [fuzzer.next_request() for _ in range(width)]
            answers = [
                pool.submit(ask, small_server, prompt, hint)
                for prompt, hint in requests
            ]
            fuzzer.disturb(small_server)
            for (prompt, _hint), answer in zip(requests, answers, strict=True):
                assert_same_output(answer.result(), ask(stock_server, prompt))
    assert small_server.stats()["internal_errors"] == 0
