from __future__ import annotations

import json
import shlex

from benchmarks.demo.serve import usage
from sam_connector.protocol.agent_hint import parse_edits


def test_prints_two_curl_lines_that_a_shell_understands() -> None:
    lines = [line for line in usage("http://h:1").splitlines() if "curl" in line]
    request, control = (shlex.split(line) for line in lines)
    assert request[2] == "http://h:1/v1/chat/completions"
    assert json.loads(request[-1])["agent_hint"]["session_id"] == "worker-7"
    assert control[2] == "http://h:1/v1/agent/sessions/worker-7/edits"
    assert parse_edits(json.loads(control[-1])["edits"])
