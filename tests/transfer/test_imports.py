"""The package runs where there is torch and nothing of vLLM, and looks at no other."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import sam_connector.transfer

FOLDER = Path(sam_connector.transfer.__file__).parent
OURS = ("sam_connector.transfer", "sam_connector.errors", "sam_connector.core.types")

PROGRAM = """
import importlib, pkgutil, sys
sys.modules["vllm"] = None
import torch
import sam_connector.transfer as transfer
for module in pkgutil.iter_modules(transfer.__path__):
    importlib.import_module(f"sam_connector.transfer.{module.name}")
region = torch.arange(256, dtype=torch.uint8).view(4, 64)
groups = {0: [region]}
layout = transfer.SlotLayout.of(groups)
pool = transfer.HostPool(2, layout.slot_bytes)
engine = transfer.make_copy_engine(groups, layout, pool, device=region.device)
part = transfer.GroupCopy(0, [2], [1])
engine.submit(transfer.CopyJob(1, transfer.Direction.STORE, (part,)))
assert engine.drain(10)
assert engine.poll() == [transfer.JobResult(1)]
assert torch.equal(pool.tensor[1], region[2])
print("copied")
"""


def test_it_works_without_vllm_and_ends_without_close() -> None:
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=FOLDER.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (program.returncode, program.stdout.strip()) == (0, "copied"), program.stderr


def test_it_imports_nothing_else_of_ours() -> None:
    imported = {
        name
        for path in FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in _imported(node)
    }
    ours = {name for name in imported if name.startswith("sam_")}
    assert {name for name in ours if not name.startswith(OURS)} == set()
    assert not any(name.split(".")[0] == "vllm" for name in imported)


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0
        return [node.module or ""]
    return []
