"""Directories of suite runs, as hil writes them, created without running a suite."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from hil.controller.records.base import make_record
from hil.controller.records.suite import CaseRecord, SuiteRecord, make_case_record
from hil.controller.workloads.suites.store import HEAD, LINES
from hil.core.text import convert_to_json

SEED = 7
STAGES_S = {
    "import": 0.02,
    "compile": 0.9,
    "push": 0.01,
    "load": 0.02,
    "run": 0.03,
    "fetch": 0.002,
    "refer": 0.01,
    "compare": 0.001,
}
ERRORS = {
    "COMPILE_ERROR": ("compile", "failed to legalize operation 'torch.operator' that was explicitly marked illegal"),
    "COMPILE_CRASH": ("compile", "the compiler died of signal 6 (SIGABRT)"),
    "RUN_CRASH": ("run", "the worker died of signal 4 (SIGILL)"),
    "TIMEOUT": ("run", "the program ran longer than 60 s"),
    "BOARD_LOST": ("push", "the board stopped answering"),
}
MODELS = {
    "digits_cnn": ["Conv+Relu", "MaxPool", "Conv+Relu", "MaxPool", "Flatten", "Gemm"],
    "residual_cnn": ["Conv+Relu", "Conv", "Add+Relu", "Conv+Relu", "Conv", "Add+Relu", "GlobalAveragePool", "Gemm"] * 3,
    "transformer_block": ["LayerNormalization", "MatMul+Add", "Softmax", "MatMul", "Add", "Gelu", "MatMul+Add", "Add"]
    * 4,
    "lstm": ["LSTM", "Squeeze", "Gemm"],
    "u_net": ["Conv+Relu", "MaxPool", "ConvTranspose", "Concat", "Conv+Relu", "Resize", "Sigmoid"] * 3,
}


def comparison(*, passed: bool = True, sqnr_db: Any = 92.5, name: str = "y", **other: Any) -> dict[str, Any]:
    """Return the comparison of one output with its reference."""
    share = 0.0 if passed else 0.04
    return {
        "name": name,
        "passed": passed,
        "reason": "" if passed else "41 of 1024 elements are out of tolerance, the worst at [0, 3, 17]",
        "dtype": "float32",
        "shape": [1, 16, 64],
        "reference_dtype": "float32",
        "reference_shape": [1, 16, 64],
        "tolerance": {"rtol": 1e-3, "atol": 1e-4},
        "elements": 1024,
        "mismatches": round(1024 * share),
        "mismatch_share": share,
        "max_abs": 1e-6 if passed else 0.37,
        "max_rel": 1e-5 if passed else 4.2,
        "max_ulp": 12 if passed else 2_100_331,
        "mean_abs": 1e-7,
        "rmse": 2e-7,
        "cosine": 1.0,
        "sqnr_db": sqnr_db,
        "first_index": None if passed else [0, 0, 4],
        "first_values": None if passed else [0.1, 0.4],
        "worst_index": None if passed else [0, 3, 17],
        "worst_values": None if passed else [1.25, 0.88],
        **other,
    }


def case(id: str, outcome: str = "PASS", **values: Any) -> CaseRecord:
    """Return the record of a case with this outcome. Other arguments replace fields of the record."""
    stage, message = ERRORS.get(outcome, ("compare", ""))
    ended = values.get("ended", {"XFAIL": "FAIL", "XPASS": "PASS"}.get(outcome, outcome))
    if ended == "FAIL" and outcome != "XPASS":
        message = "y: 41 of 1024 elements are out of tolerance, the worst at [0, 3, 17]"
    if outcome == "XPASS":
        message = "it passed, and was expected to fail"
    compared = stage == "compare"
    given: dict[str, Any] = {
        "id": id,
        "model": "digits_cnn",
        "suite": "models",
        "flow": "iree",
        "runtime": "iree",
        "outcome": outcome,
        "ended": ended,
        "board": "sim",
        "hw_type": "sim",
        "stage": stage,
        "message": message,
        "timings": dict.fromkeys((f"{name}_s" for name in STAGES_S), 0.01),
        "device_p50_ns": 125_000.0 if compared else None,
        "device_p90_ns": 130_000.0 if compared else None,
        "iterations": 10 if compared else 0,
        "artifact_bytes": 18_400,
        "cached": False,
        "outputs": (comparison(passed=ended != "FAIL", sqnr_db=92.5 if ended != "FAIL" else 7.1),) if compared else (),
        "against": "onnxruntime 1.31.1" if compared else "",
        "repeat": f"hil suite run @models --flow iree --filter {id}",
        "diff": f"hil compare hil-suites/r/cases/{id}/outputs/0-y.npy hil-suites/r/cases/{id}/references/0-y.npy"
        if ended == "FAIL"
        else "",
        "folder": "" if outcome == "PASS" else f"cases/{id}",
        "started": 1_770_000_000.0,
    }
    return make_case_record({**given, **values})


def suite_head(**changes: Any) -> SuiteRecord:
    """Return suite.json of a finished run, with changed fields."""
    head = {
        "schema": 1,
        "id": "r",
        "source": "@models",
        "suite": "models",
        "flow": "iree",
        "runtime": "iree",
        "boards": ["sim"],
        "command": "hil suite run --resume hil-suites/r",
        "versions": {"hil": "0.1.0", "iree-compile": "3.13.0", "onnxruntime": "1.31.1"},
        "ids": [],
        "suite_ids": [],
        "expected": None,
        "interrupted": False,
        "started": 1_770_000_000.0,
        "finished": 1_770_000_042.5,
        "exit_code": 1,
    }
    return make_record({**head, **changes}, SuiteRecord)


def suite_run(folder: Path, records: list[CaseRecord], *, missing: tuple[str, ...] = (), **header: Any) -> Path:
    """Write the directory of a run. Return its path.

    Args:
        folder: directory to create.
        records: cases with a result.
        missing: ids of cases without a result.
        header: fields of suite.json to replace.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ids = [*(record.id for record in records), *missing]
    head = suite_head(**{"id": folder.name, "ids": ids, "suite_ids": ids, **header})
    (folder / HEAD).write_text(json.dumps(head.to_json()))
    lines = (json.dumps(convert_to_json(record.to_json()), allow_nan=False) + "\n" for record in records)
    (folder / LINES).write_text("".join(lines))
    return folder


def large_run(cases: int) -> list[CaseRecord]:
    """Write a run with many cases of several models, seeded.

    Most cases pass, and some have one of the other outcomes.
    """
    rolled = random.Random(SEED)
    records: list[CaseRecord] = []
    while len(records) < cases:
        again = f"_{len(records)}" if records else ""
        for model, ops in MODELS.items():
            records.append(_rolled(rolled, f"{model}{again}", "", ""))
            records += [
                _rolled(rolled, f"{model}{again}", op, f"{op.split('+')[0].lower()}_{n}") for n, op in enumerate(ops)
            ]
    return records[:cases]


def _rolled(rolled: random.Random, model: str, op: str, layer: str) -> CaseRecord:
    name = f"{model}_layer_{op.replace('+', '_')}_{layer}" if layer else f"{model}_full_model"
    weights = {"PASS": 88, "FAIL": 4, "XFAIL": 2, "XPASS": 0.5, "SKIP": 1, **dict.fromkeys(ERRORS, 0.9)}
    outcome = rolled.choices(list(weights), list(weights.values()))[0]
    passed = outcome in ("PASS", "XPASS")
    sqnr: Any = (
        "inf"
        if op in ("MaxPool", "Flatten", "Squeeze", "Concat")
        else rolled.gauss(118, 9)
        if passed
        else rolled.gauss(9, 5)
    )
    compared = outcome not in ERRORS and outcome != "SKIP"
    max_abs = 0.0 if sqnr == "inf" else 10 ** (-float(sqnr) / 20)
    values: dict[str, Any] = {
        "model": model,
        "op": op,
        "layer": layer,
        "timings": {f"{key}_s": value * rolled.uniform(0.5, 3) for key, value in STAGES_S.items()},
        "device_p50_ns": rolled.lognormvariate(11.5, 1.2) * (1 if layer else 12) if compared else None,
        "artifact_bytes": int(rolled.lognormvariate(10, 0.7)),
        "cached": rolled.random() < 0.5,
        "outputs": (comparison(passed=passed, sqnr_db=sqnr, max_abs=max_abs),) if compared else (),
    }
    if outcome == "XFAIL":
        values["expectation"] = {
            "outcome": "FAIL",
            "reason": "tanh is approximated",
            "issue": "https://example.com/issues/17",
        }
    if outcome == "FAIL":
        values["confirmed"] = rolled.choice(["always wrong", "always wrong", "flaky", "one bad board"])
        values["attempts"] = ({"why": "confirm", "board": "sim", "outcome": "FAIL", "message": "41 of 1024"},)
    if outcome in ERRORS:
        values["hint"] = "the log has all that the tool said"
        values["detail"] = f"{name}.mlir:17:12: error: {ERRORS[outcome][1]}\n" + "    note: called from here\n" * 12
    return case(name, outcome, **values)
