"""Builds the small Llama that the demo and the live tests serve.

Nothing is downloaded: the weights are random, the tokenizer is trained on the
licence text of this repository. Weights this widely spread make greedy output vary
from token to token, so a wrong KV block shows in the text.

Run ``python -m benchmarks.demo.model DIR`` to build one by hand.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import CACHE_DIR, REPO_ROOT

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL_TOKENS = ("<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Geometry of the model; two equal specs give the same bytes on disk."""

    hidden_size: int = 384
    intermediate_size: int = 1024
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 6
    vocab_size: int = 1024
    max_position: int = 16384
    initializer_range: float = 0.2
    dtype: str = "bfloat16"
    seed: int = 7

    @property
    def digest(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


DEMO_MODEL = ModelSpec()


def ensure_model(spec: ModelSpec = DEMO_MODEL) -> Path:
    """Folder of the model, built first if it is not there.

    The build runs in a process of its own so that the caller loads no torch.
    """
    folder = CACHE_DIR / "models" / spec.digest
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{spec.digest}."))
    command = [sys.executable, "-m", __name__, str(part), json.dumps(asdict(spec))]
    try:
        subprocess.run(command, cwd=REPO_ROOT, check=True, stdout=subprocess.DEVNULL)
        # Another process may have finished the same build meanwhile.
        if not folder.exists():
            os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def build(folder: Path, spec: ModelSpec) -> None:
    """Write config, weights and tokenizer of ``spec`` into ``folder``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(spec.seed)
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_position,
        initializer_range=spec.initializer_range,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, spec.dtype))
    _write_tokenizer(folder, spec)
    model.save_pretrained(folder)


def _write_tokenizer(folder: Path, spec: ModelSpec) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab_size,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (REPO_ROOT / "LICENSE").read_text(encoding="utf-8")
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|end|>"
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)


if __name__ == "__main__":
    given = ModelSpec(**json.loads(sys.argv[2])) if len(sys.argv) > 2 else DEMO_MODEL
    build(Path(sys.argv[1]), given)
