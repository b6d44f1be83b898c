"""``python -m benchmarks.demo.serve``: the demo's server, ours, for use by hand."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
import time

from benchmarks.demo.client import MODEL_NAME
from benchmarks.demo.model import ensure_model
from benchmarks.demo.server import ServerKind, demo_workload, make_server, pool_blocks

_CHAT = {
    "model": MODEL_NAME,
    "max_tokens": 16,
    "messages": [
        {
            "role": "user",
            "content": "Inspect the repository, find the test that fails since the "
            "last release, explain in three sentences why it fails, and propose the "
            "smallest change that mends it without touching any other test.",
        }
    ],
    "agent_hint": {
        "session_id": "worker-7",
        "cache_control": {"type": "ephemeral", "ttl": 300},
    },
}


def usage(url: str) -> str:
    """Lines to type: a request with a hint, and control calls."""
    header = "-H 'Content-Type: application/json'"
    session = f"{url}/v1/agent/sessions/worker-7"

    def edit(kind: str) -> str:
        body = json.dumps({"edits": [{"type": kind}], "wait_s": 10})
        return f"  curl -s {session}/edits {header} -d '{body}'\n"

    return (
        "A request that belongs to a session and keeps its cache for five minutes:\n"
        f"  curl -s {url}/v1/chat/completions {header} -d '{json.dumps(_CHAT)}'\n\n"
        "Where its blocks are:\n"
        f"  curl -s {session}\n\n"
        "It waits for others: move its cache to host memory. It comes back:\n"
        f"{edit('offload')}{edit('prefetch')}\n"
        "It is done, give its cache up:\n"
        f"{edit('evict')}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.demo.serve", description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(argv)
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.default_int_handler)
    try:
        return _serve(options.port)
    except KeyboardInterrupt:
        # Nothing to tidy up: the server does not outlive this process.
        return 0


def _serve(port: int) -> int:
    """Run the server until it ends by itself, which it should not."""
    if not _is_free(port):
        print(f"port {port} is in use; choose another with --port", file=sys.stderr)
        return 2
    print("building the small model (once) and starting the server", flush=True)
    model = ensure_model()
    workload = demo_workload()
    blocks = pool_blocks(workload, 2 / 3)
    kind = ServerKind.HINTS
    with make_server(model, workload, blocks, kind=kind, port=port) as server:
        print(f"ready: {server.url} (log: {server.log_path}; Ctrl-C stops it)\n")
        print(usage(server.url), flush=True)
        while server.is_running:
            time.sleep(0.5)
    print(f"the server ended; see {server.log_path}", file=sys.stderr)
    return 1


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
