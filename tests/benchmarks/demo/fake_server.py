"""What the demo needs of a server, in process: answers, caches, control routes."""

from __future__ import annotations

import json
from typing import Any

import httpx

from benchmarks.demo.client import DemoClient
from benchmarks.demo.workload import TraceRow, Workload, build_workload

BYTES_PER_REQUEST = 1000


class FakeServer:
    """Every prompt is cached until a reset; generated tokens depend on it alone.

    Attributes:
        log: what was asked, in order: ``generate``, or method, route and body.
        statuses: status of an edit's result, by its type.
        refused: HTTP status of calls whose path ends so.
        resets_refused: how many more resets of the prefix cache fail.
        num_preemptions: what the metrics say.
        drift: added to every generated token.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.hints: list[object] = []
        self.statuses: dict[str, str] = {}
        self.refused: dict[str, int] = {}
        self.resets_refused = 0
        self.resets_have_effect = True
        self.num_preemptions = 0
        self.drift = 0
        self._cached: list[list[int]] = []
        self._saved_bytes = 0

    def client(self) -> DemoClient:
        return DemoClient("http://fake", transport=httpx.MockTransport(self._handle))

    @property
    def controls(self) -> list[tuple[str, ...]]:
        """What the harness said, without the set-up."""
        return [entry for entry in self.log if entry[0] in ("lease", "edit")]

    def _handle(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        path = request.url.path
        for ending, status in self.refused.items():
            if path.endswith(ending):
                self.log.append(("refused", path))
                return httpx.Response(status, json={"error": "no"})
        if path == "/v1/completions":
            return self._generate(body)
        if path == "/metrics":
            text = f'vllm:num_preemptions_total{{engine="0"}} {self.num_preemptions}\n'
            return httpx.Response(200, text=text)
        if path == "/reset_prefix_cache":
            return self._reset(str(request.url.query.decode()))
        return self._control(request.method, path, body)

    def _generate(self, body: dict[str, Any]) -> httpx.Response:
        prompt = body["prompt"]
        hint = body.get("agent_hint")
        self.log.append(("generate", hint["session_id"] if hint else ""))
        self.hints.append(hint)
        cached = max((_common(prompt, other) for other in self._cached), default=0)
        self._cached.append(prompt)
        self._saved_bytes += BYTES_PER_REQUEST
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        tokens = [sum(prompt) + self.drift + i for i in range(body["max_tokens"])]
        choice = {"token_ids": tokens, "text": "x"}
        answer = {"choices": [choice], "usage": usage}
        if body.get("stream"):
            return httpx.Response(200, text=f"data: {json.dumps(answer)}\n\n")
        return httpx.Response(200, json=answer)

    def _reset(self, query: str) -> httpx.Response:
        self.log.append(("reset", query))
        if self.resets_refused:
            self.resets_refused -= 1
            return httpx.Response(200, json={"success": False})
        if self.resets_have_effect:
            self._cached.clear()
        return httpx.Response(200, json={"success": True})

    def _control(self, method: str, path: str, body: dict[str, Any]) -> httpx.Response:
        if path == "/v1/agent/stats":
            stats = {"saved_bytes": self._saved_bytes, "loaded_bytes": 7}
            return httpx.Response(200, json=stats)
        if path == "/v1/agent/reset":
            self.log.append(("reset sessions",))
            return httpx.Response(200, json={})
        session = path.split("/")[4]
        if path.endswith("/lease"):
            assert method == "PUT"
            self.log.append(("lease", session, str(body["ttl"])))
            return httpx.Response(200, json={"session_id": session})
        kinds = [edit["type"] for edit in body["edits"]]
        self.log += [("edit", session, kind) for kind in kinds]
        results = [
            {"type": kind, "status": self.statuses.get(kind, "completed")}
            for kind in kinds
        ]
        return httpx.Response(200, json={"results": results})


def _common(one: list[int], other: list[int]) -> int:
    for i, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return i
    return min(len(one), len(other))


def row(
    session: str, start_s: float, end_s: float, tokens: int, parent: str | None = None
) -> TraceRow:
    return TraceRow(
        session=session,
        parent=parent,
        start_s=start_s,
        end_s=end_s,
        input_tokens=tokens,
        output_tokens=2,
    )


#: A lead spawns two children, waits for both, resumes after a pause, and ends.
LEAD_AND_CHILDREN = [
    row("a/lead", 0, 1, 100),
    row("a/sub-1", 2, 3, 40, parent="a/lead"),
    row("a/sub-2", 2.5, 6, 50, parent="a/lead"),
    row("a/sub-1", 4, 5, 60, parent="a/lead"),
    row("a/lead", 7, 8, 150),
    row("a/lead", 9, 10, 170),
]


def plan(rows: list[TraceRow], *, gap_divisor: float = 1000.0) -> Workload:
    return build_workload(
        rows,
        num_rows=len(rows),
        token_divisor=1,
        gap_divisor=gap_divisor,
        vocab_size=1024,
    )
