"""A streaming client of ``/v1/completions`` that measures what a caller feels."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from benchmarks.demo.policy import ControlCall

MODEL_NAME = "demo"
_DATA = "data: "
#: Less than the server's five seconds, so that it never closes what is being reused.
_KEEPALIVE_S = 2.0
_RESET_TIMEOUT_S = 20.0
_RESET_PERIOD_S = 0.1


class ControlError(RuntimeError):
    """The server refused a control call."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer as the client saw it."""

    ttft_s: float
    latency_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class DemoClient:
    """Talks to one server; use as an async context manager."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 240.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S)
        self._http = httpx.AsyncClient(
            base_url=url, timeout=timeout_s, limits=limits, transport=transport
        )

    async def __aenter__(self) -> DemoClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    async def stream(
        self,
        prompt: list[int],
        num_output_tokens: int,
        hint: Mapping[str, object] | None,
    ) -> Completion:
        """Generate greedily, exactly ``num_output_tokens`` tokens."""
        body = _body(prompt, num_output_tokens, hint)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        begin = time.monotonic()
        first: float | None = None
        usage: dict[str, object] = {}
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                await response.aread()
                _raise(response)
            async for line in response.aiter_lines():
                if not line.startswith(_DATA) or line == f"{_DATA}[DONE]":
                    continue
                chunk = json.loads(line.removeprefix(_DATA))
                if "error" in chunk:
                    raise RuntimeError(f"the server answered {chunk['error']}")
                if chunk["choices"] and first is None:
                    first = time.monotonic()
                usage = chunk.get("usage") or usage
        end = time.monotonic()
        return _completion(usage, ttft_s=(first or end) - begin, latency_s=end - begin)

    async def generate(
        self,
        prompt: list[int],
        num_output_tokens: int,
        hint: Mapping[str, object] | None,
    ) -> tuple[list[int], Completion]:
        """The generated token ids of one greedy request, not streamed."""
        body = _body(prompt, num_output_tokens, hint)
        body["return_token_ids"] = True
        begin = time.monotonic()
        response = await self._http.post("/v1/completions", json=body)
        _raise(response)
        latency_s = time.monotonic() - begin
        answer = response.json()
        done = _completion(answer["usage"], ttft_s=latency_s, latency_s=latency_s)
        return list(answer["choices"][0]["token_ids"]), done

    async def control(self, call: ControlCall) -> object:
        """The answer of a control route.

        Raises:
            ControlError: the server refused.
        """
        response = await self._http.request(call.method, call.path, json=call.body)
        if response.is_error:
            raise ControlError(response.status_code, _problem(response))
        return response.json()

    async def reset(self, *, sessions: bool) -> None:
        """Empty every cache of the server, also that in host memory.

        Args:
            sessions: whether it knows sessions, which then lose their content.

        Raises:
            RuntimeError: something held blocks for too long.
        """
        if sessions:
            await self.control(ControlCall(method="POST", path="/v1/agent/reset"))
        deadline = time.monotonic() + _RESET_TIMEOUT_S
        while time.monotonic() < deadline:
            response = await self._http.post(
                "/reset_prefix_cache", params={"reset_external": "true"}
            )
            _raise(response)
            if response.json()["success"]:
                return
            await asyncio.sleep(_RESET_PERIOD_S)
        raise RuntimeError("the server could not reset its caches: blocks are in use")

    async def stats(self) -> dict[str, object]:
        """``/v1/agent/stats`` of a server of ours."""
        call = ControlCall(method="GET", path="/v1/agent/stats")
        stats = await self.control(call)
        assert isinstance(stats, dict)
        return stats

    async def version(self) -> str:
        """Of the engine."""
        response = await self._http.get("/version")
        _raise(response)
        return str(response.json()["version"])

    async def metrics(self) -> str:
        response = await self._http.get("/metrics")
        _raise(response)
        return response.text


def _body(
    prompt: list[int], num_output_tokens: int, hint: Mapping[str, object] | None
) -> dict[str, object]:
    body: dict[str, object] = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    if hint is not None:
        body["agent_hint"] = dict(hint)
    return body


def _completion(
    usage: Mapping[str, object], *, ttft_s: float, latency_s: float
) -> Completion:
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Completion(
        ttft_s=ttft_s,
        latency_s=latency_s,
        prompt_tokens=int(str(usage["prompt_tokens"])),
        cached_tokens=int(cached or 0),
        completion_tokens=int(str(usage["completion_tokens"])),
    )


def _raise(response: httpx.Response) -> None:
    if response.is_error:
        raise RuntimeError(_problem(response))


def _problem(response: httpx.Response) -> str:
    return (
        f"{response.request.method} {response.request.url.path} answered "
        f"{response.status_code}: {response.text[:500]}"
    )
