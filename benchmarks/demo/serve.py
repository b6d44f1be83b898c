"""``python -m benchmarks.demo.serve``: the demo's server, ours, for use by hand."""

from __future__ import annotations

import argparse
import signal
import sys
import time

from benchmarks.demo.client import MODEL_NAME
from benchmarks.demo.model import ensure_model
from benchmarks.demo.server import demo_workload, make_server, pool_blocks

_USAGE = """\
ready: {url}   (log: {log}; Ctrl-C stops it)

A request that belongs to a session and keeps its cache for five minutes:
  curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d \
'{{"model": "{model}", "max_tokens": 16, "messages": [{{"role": "user", \
"content": "Inspect the repository, find the test that fails since the last release, \
explain in three sentences why it fails, and propose the smallest change that mends \
it without touching the public interface of the package or any other test."}}], "agent_hint": {{"session_id": "worker-7", \
"cache_control": {{"type": "ephemeral", "ttl": 300}}}}}}'

The session is done, give its cache up:
  curl -s {url}/v1/agent/sessions/worker-7/edits -H 'Content-Type: application/json' \
-d '{{"edits": [{{"type": "evict"}}]}}'
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.demo.serve", description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _serve(options.port)
    except KeyboardInterrupt:
        # Nothing to tidy up: the server does not outlive this process.
        return 0


def _serve(port: int) -> int:
    """Run the server until it ends by itself, which it should not."""
    print("building the small model (once) and starting the server", flush=True)
    model = ensure_model()
    workload = demo_workload()
    blocks = pool_blocks(workload, 2 / 3)
    with make_server(model, workload, blocks, hints=True, port=port) as server:
        usage = _USAGE.format(url=server.url, log=server.log_path, model=MODEL_NAME)
        print(usage, flush=True)
        while server.is_running:
            time.sleep(0.5)
    print(f"the server ended; see {server.log_path}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
