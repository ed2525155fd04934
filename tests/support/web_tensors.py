"""Stored run with tensors that no board computed, and hil's verdict for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hil.compare.verdict import compare
from hil.controller.pipeline.records.record import record_verdict
from hil.core.npy import save_npy
from hil.core.results import RunResult
from hil.core.tensors import get_dtype_name
from hil.core.text import convert_to_json
from support.web import write_run


def write_tensors(
    root: Path, outputs: dict[str, Any], references: dict[str, Any], inputs: Any = None, name: str = "run"
) -> Path:
    """Write a stored run with one case, ``model``, with these tensors and hil's verdict for them."""
    kinds = {"inputs": inputs or {}, "outputs": outputs, "reference-0": references}
    entries: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for kind, tensors in kinds.items():
        (root / name / "model" / kind).mkdir(parents=True)
        for number, (title, array) in enumerate(tensors.items()):
            file = f"model/{kind}/{number}.npy"
            save_npy(root / name / file, array)
            entries[kind].append(
                {"name": title, "dtype": get_dtype_name(array.dtype), "shape": [*array.shape], "file": file}
            )
    verdict = compare(RunResult("board", outputs), RunResult("a reference", references))
    case = {
        "outcome": verdict.outcome.value,
        "inputs": entries["inputs"],
        "outputs": entries["outputs"],
        "references": [{"source": "a reference", "outputs": entries["reference-0"]}],
        "verdicts": [record_verdict(verdict).to_json()],
    }
    return write_run(root, name, [convert_to_json(case)])
