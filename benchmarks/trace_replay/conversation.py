"""A recorded chat service: content by block, no session ids.

A hash id stands for 512 tokens together with all before them, so a request's blocks
need no tokens. A request continues the earlier one whose last whole block is the
furthest on in its own; what it continues makes a session. Prompts alone are replayed,
in an open loop: they are longer than one GPU could prefill in the recorded time.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash

from benchmarks.trace_replay.workload import Context, Turn, Workload

BLOCK_SIZE = 512
_MAX_TOKENS = 131_072
_ANY_TOKENS = [0] * _MAX_TOKENS


def read_conversation(path: Path) -> Workload:
    """Reads JSON lines with ``timestamp`` in ms, ``input_length`` and ``hash_ids``."""
    lines = path.read_text(encoding="utf-8").splitlines()
    records = sorted(map(json.loads, lines), key=lambda record: record["timestamp"])
    common = {record["hash_ids"][0] for record in records if record["hash_ids"]}
    #: By the last whole block of a session, which it is.
    open_ends: dict[int, str] = {}
    turns = []
    for index, record in enumerate(records):
        whole = record["hash_ids"][: record["input_length"] // BLOCK_SIZE]
        known = next((i for i in reversed(whole) if i in open_ends), None)
        session = f"chat-{index}" if known is None else open_ends.pop(known)
        if whole and whole[-1] not in common:
            open_ends[whole[-1]] = session
        turns.append(_turn(index, session, record))
    return Workload(turns=turns, block_size=BLOCK_SIZE)


def _turn(index: int, session: str, record: dict[str, Any]) -> Turn:
    context = Context(
        session,
        num_tokens=record["input_length"] + 1,
        block_size=BLOCK_SIZE,
        token_ids=_ANY_TOKENS,
        block_hashes=[_hash(i) for i in record["hash_ids"]],
    )
    return Turn(
        index=index,
        session=session,
        input_tokens=record["input_length"],
        output_tokens=1,
        context=context,
        gap_s=record["timestamp"] / 1_000,
    )


def _hash(hash_id: int) -> BlockHash:
    return BlockHash(hashlib.sha256(hash_id.to_bytes(8)).digest())
