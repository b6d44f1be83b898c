from __future__ import annotations

from typing import Any

import pytest

from benchmarks.demo_redis.__main__ import (
    Pair,
    is_found,
    main,
    make_server,
    run_pair,
    summary,
)
from benchmarks.demo_redis.client import Answer, SessionClient


def pair(**changed: Any) -> Pair:
    fields: dict[str, Any] = {
        "ttft_cold_s": 2.0,
        "ttft_prefetched_s": 0.5,
        "prefetch_s": 0.1,
        "prompt_tokens": 100,
        "cached_tokens": 96,
        "is_identical": True,
        "read_bytes": 10,
    }
    return Pair(**{**fields, **changed})


class FakeClient(SessionClient):
    """A server in process, in front of what ``stored`` sessions are in a store.

    Attributes:
        log: what was asked, in order.
        told: tokens that it answers to a cold request, instead of the right ones.
        cold_hits: cached tokens of a cold request.
        read_bytes: from the store, by a prefetch.
        hit_share: of a prompt, that is cached after a prefetch.
    """

    def __init__(self, stored: set[str]) -> None:
        super().__init__("http://nowhere.invalid")
        self.log: list[str] = []
        self.told: list[int] | None = None
        self.cold_hits = 0
        self.read_bytes = 7
        self.hit_share = 1.0
        self.is_emptied = True
        self._stored = stored
        self._held: set[str] = set()
        self._num_read = 0

    def complete(
        self,
        prompt: list[int],
        num_tokens: int,
        *,
        session_id: str | None = None,
        cache_salt: str | None = None,
    ) -> Answer:
        self.log.append("cold" if cache_salt else "complete")
        is_hit = session_id in self._held
        tokens = [sum(prompt)] * num_tokens
        cached = int(self.hit_share * len(prompt)) if is_hit else 0
        return Answer(
            token_ids=self.told or tokens if cache_salt else tokens,
            ttft_s=3.0 if cache_salt else 1.0,
            prompt_tokens=len(prompt),
            cached_tokens=self.cold_hits if cache_salt else cached,
        )

    def edit(self, session_id: str, kind: str) -> dict[str, Any]:
        self.log.append(kind)
        if kind == "offload":
            self._stored.add(session_id)
        elif session_id in self._stored:
            self._held.add(session_id)
            self._num_read += self.read_bytes
        return {}

    def empty(self) -> None:
        self.log.append("empty")
        self._held.clear()

    def check_empty(self) -> None:
        if not self.is_emptied:
            raise RuntimeError("the server is not empty")

    def stat(self, name: str) -> int:
        assert name == "store_read_bytes"
        return self._num_read


@pytest.fixture
def clients() -> tuple[FakeClient, FakeClient]:
    stored: set[str] = set()
    return FakeClient(stored), FakeClient(stored)


# --- summary --------------------------------------------------------------------------


def test_times_are_medians_and_counts_are_sums() -> None:
    pairs = [
        pair(ttft_prefetched_s=0.2, prefetch_s=0.3),
        pair(ttft_cold_s=4.0, read_bytes=5),
        pair(ttft_cold_s=100.0, ttft_prefetched_s=90.0, cached_tokens=50),
    ]
    result = summary(pairs, found_after_restart=True)
    assert result["resume_ttft_cold_s"] == 4.0
    assert result["resume_ttft_prefetched_s"] == 0.5
    assert result["ratio"] == 0.125
    assert result["prefetch_s"] == 0.1
    assert (result["cached_tokens"], result["prompt_tokens"]) == (242, 300)
    assert result["store_bytes_read"] == 25
    assert result["pairs"] == 3
    assert result["least_cached_share"] == 0.5
    assert result["machine"]


def test_one_session_with_other_tokens_is_not_identical() -> None:
    good, bad = pair(), pair(is_identical=False)
    one = summary([good, bad, good], found_after_restart=True)
    assert one["tokens_identical"] is False
    assert summary([good], found_after_restart=True)["tokens_identical"] is True


@pytest.mark.parametrize("found", [True, False])
def test_it_says_whether_the_restarted_server_found_its_session(found: bool) -> None:
    result = summary([pair()], found_after_restart=found)
    assert result["found_after_restart"] is found


# --- one session ----------------------------------------------------------------------


def test_a_session_is_stored_by_a_and_resumed_by_an_emptied_b(
    clients: tuple[FakeClient, FakeClient],
) -> None:
    a, b = clients
    made = run_pair(a, b, 0, seed=1)
    assert a.log == ["complete", "offload"]
    assert b.log == ["empty", "cold", "empty", "prefetch", "complete"]
    assert made.is_identical
    assert made.cached_tokens == made.prompt_tokens > 3_000
    assert (made.ttft_cold_s, made.ttft_prefetched_s) == (3.0, 1.0)
    assert made.read_bytes == 7


def test_the_cold_request_comes_last_every_other_time(
    clients: tuple[FakeClient, FakeClient],
) -> None:
    a, b = clients
    made = run_pair(a, b, 1, seed=1)
    assert b.log == ["empty", "prefetch", "complete", "empty", "cold"]
    assert (made.ttft_cold_s, made.ttft_prefetched_s) == (3.0, 1.0)


def test_other_tokens_than_those_of_the_cold_request_are_told(
    clients: tuple[FakeClient, FakeClient],
) -> None:
    a, b = clients
    b.told = [1, 2, 3]
    assert not run_pair(a, b, 0, seed=1).is_identical


def test_a_comparison_with_what_was_not_cold_is_refused(
    clients: tuple[FakeClient, FakeClient],
) -> None:
    a, b = clients
    b.cold_hits = 32
    with pytest.raises(RuntimeError, match="a cold request found 32 tokens"):
        run_pair(a, b, 0, seed=1)


def test_hits_that_did_not_come_from_the_store_are_refused(
    clients: tuple[FakeClient, FakeClient],
) -> None:
    a, b = clients
    b.read_bytes = 0
    with pytest.raises(RuntimeError, match="read nothing"):
        run_pair(a, b, 0, seed=1)


def test_a_server_that_could_not_be_emptied_is_refused(
    clients: tuple[FakeClient, FakeClient],
) -> None:
    a, b = clients
    b.is_emptied = False
    with pytest.raises(RuntimeError, match="not empty"):
        run_pair(a, b, 0, seed=1)


@pytest.mark.parametrize(
    ("share", "found"), [(0.0, False), (0.5, False), (0.95, True), (1.0, True)]
)
def test_a_session_is_found_if_nearly_all_of_it_is_cached(
    clients: tuple[FakeClient, FakeClient], share: float, found: bool
) -> None:
    a, b = clients
    a.edit("agent-5", "offload")
    b.hit_share = share
    assert is_found(b, 5) is found


# --- the command line -----------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--pairs", "x"], ["--store"], ["--other"]])
def test_wrong_arguments_start_nothing(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: benchmarks.demo_redis" in capsys.readouterr().err


def test_both_servers_have_the_store_and_logs_of_their_own(tmp_path: Any) -> None:
    a = make_server(tmp_path, "a", "redis://host:1/2")
    b = make_server(tmp_path, "b", "redis://host:1/2")
    assert a.log_path != b.log_path
    assert a.url != b.url
