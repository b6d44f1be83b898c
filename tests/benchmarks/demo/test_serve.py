from __future__ import annotations

import json
import shlex

from benchmarks.demo.serve import usage
from sam_connector.protocol.agent_hint import parse_edits


def test_prints_curl_lines_that_a_shell_understands() -> None:
    lines = [line for line in usage("http://h:1").splitlines() if "curl" in line]
    request, show, *edits = (shlex.split(line) for line in lines)
    session = "http://h:1/v1/agent/sessions/worker-7"
    assert request[2] == "http://h:1/v1/chat/completions"
    assert json.loads(request[-1])["agent_hint"]["session_id"] == "worker-7"
    assert show[2] == session
    kinds = []
    for edit in edits:
        assert edit[2] == f"{session}/edits"
        (parsed,) = parse_edits(json.loads(edit[-1])["edits"])
        kinds.append(parsed.type.value)
    assert kinds == ["offload", "prefetch", "evict"]
