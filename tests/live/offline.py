"""An offline script with hints: ``python -m tests.live.offline MODEL``.

It prints one line of JSON and ends by itself.
"""

from __future__ import annotations

import json
import sys
from functools import partial

BLOCK_SIZE = 32
PROMPT = list(range(100, 300))
HINT = {
    "session_id": "offline",
    "cache_control": {"ttl": 600},
    "context_management": {"edits": [{"type": "offload"}]},
}


def main(model: str) -> None:
    from vllm import LLM, SamplingParams

    from sam_connector.protocol.control import GetSession, GetStats, decode_reply

    llm = LLM(
        model,
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=64,
        max_model_len=1024,
        max_num_seqs=4,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "SAMConnector",
            "kv_connector_module_path": "sam_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        },
    )
    params = SamplingParams(
        max_tokens=2, temperature=0, extra_args={"agent_hint": HINT}
    )
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    client = llm.llm_engine.engine_core
    if hasattr(client, "call_utility"):
        call = partial(client.call_utility, "sam_control")
    else:
        # The engine is in this process.
        call = client.engine_core.sam_control
    told = {
        name: decode_reply(call(command.encode())).result
        for name, command in {
            "session": GetSession(tenant="", session_id="offline"),
            "stats": GetStats(),
        }.items()
    }
    told["kv_transfer_params"] = output.kv_transfer_params
    sys.stdout.write("\n" + json.dumps(told) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
