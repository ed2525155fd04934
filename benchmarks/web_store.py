"""Write sessions for the benchmark of `hil web`: a year of runs of a suite, in the format of `hil suite run`.

All sessions have the same cases, so that each case has a history: on four kinds of boards, with noise, outliers,
intermittent failures, and :data:`REGRESSIONS`. The same numbers give the same sessions. Existing sessions are kept.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.controller.records.outputs import StoredComparison, StoredPart, StoredTolerance
from hil.controller.records.suite import CaseRecord
from hil.controller.workloads.suites.store import HEAD, LINES

YEAR_S = 365 * 86400
# (flow, runtime, board, hardware type). Each commit runs on each target.
TARGETS = (
    ("iree", "iree", "rpi5-a", "rpi5"),
    ("iree", "iree", "rpi5-b", "rpi5"),
    ("onnxruntime", "onnxruntime", "jetson-1", "jetson"),
    ("executorch", "executorch", "phone-3", "phone"),
)
# Target for the session with many cases. It has a separate board, so that board comparisons use only the other
# sessions.
_LARGE = ("iree", "iree", "server-1", "server")
_MODELS = ("mobilenet", "resnet", "squeeze_excite", "unet", "pooling_mix", "bert_tiny", "yolo", "keyword", "mlp", "gru")
_OPS = ("Conv", "Clip", "Add", "Gemm", "Relu", "BatchNormalization", "Softmax", "MatMul", "MaxPool", "Concat")


@dataclass(frozen=True)
class Regression:
    """Permanent change of a case's device time or outcome."""

    case: int
    begins: float  # part of the year before the change, 0 to 1
    factor: float = 1.0
    outcome: str = ""


REGRESSIONS = (
    Regression(7, 0.30, 1.30),
    Regression(42, 0.55, 1.08),
    Regression(120, 0.62, 0.80),
    Regression(233, 0.71, 1.15),
    Regression(300, 0.80, outcome="FAIL"),
    Regression(411, 0.93, 1.50),
)


def make_store(root: Path, sessions: int, cases: int, large: int, told: Callable[[str], None]) -> list[Path]:
    """Write missing sessions.

    Return the sessions' directories, the oldest first; the last one is the session with many cases.
    """
    root.mkdir(parents=True, exist_ok=True)
    made = _begun(root, sessions, cases, large)
    every = [Case(number) for number in range(cases)]
    folders = []
    for number in range(sessions):
        passed = number / max(1, sessions)
        folders.append(root / _name(number, made["end"] - YEAR_S * (1 - passed)))
        if write_session(folders[-1], number, passed, every, made["end"]) and number % 100 == 99:
            told(f"{number + 1} of {sessions} sessions written")
    folders.append(root / _name(sessions, made["end"]))
    many = [Case(number) for number in range(large)]
    write_session(folders[-1], sessions, 1.0, many, made["end"], target=len(TARGETS))
    return folders


def _begun(root: Path, sessions: int, cases: int, large: int) -> dict[str, Any]:
    """Return the parameters of the store.

    The end of the year is the day of the first write, because pages look back from today.
    """
    asked = {"sessions": sessions, "cases": cases, "large": large}
    path = root / ".made.json"
    if not path.exists():
        path.write_text(json.dumps({**asked, "end": time.time() // 86400 * 86400}))
    made: dict[str, Any] = json.loads(path.read_text())
    assert asked.items() <= made.items(), f"expected sessions of {asked} in {root}, got {made}"
    return made


def _name(number: int, begun: float) -> str:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(begun))
    return f"{stamp}-models-{TARGETS[number % len(TARGETS)][0]}-{number:04x}"


class Case:
    """Case in all sessions: its name, its usual time, and a template of its record."""

    def __init__(self, number: int) -> None:
        layer = number // len(_MODELS)
        self.number, self.model = number, _MODELS[number % len(_MODELS)]
        self.op = _OPS[layer % len(_OPS)] if layer else ""
        self.layer = f"{self.op}_{self.op}_{layer}" if layer else ""
        self.name = f"{self.model}_layer_{self.layer}" if layer else f"{self.model}_full_model"
        rng = random.Random(number)
        self.usual_ns = 10 ** rng.uniform(4, 7.5)
        self.max_abs = 10 ** rng.uniform(-8, -5)
        self.bytes = rng.randrange(20_000, 900_000)
        self.changes = tuple(one for one in REGRESSIONS if one.case == number)
        self._forms: dict[int, str] = {}

    def form(self, target: int) -> str:
        """Return the template of the record's line on a target."""
        if target not in self._forms:
            self._forms[target] = _form(self, *(*TARGETS, _LARGE)[target])
        return self._forms[target]


# Marks the start and the end of a field in a template whose value differs between sessions.
_MARK = "\x01"
_DIFFER = ("outcome", "message", "detail", "passed", "mismatches", "max_abs", "p50", "p90", "run_s", "started", "diff")


def _form(case: Case, flow: str, runtime: str, board: str, hw_type: str) -> str:
    """Return the template of a record's line, for the operator ``%``."""
    gap = {name: f"{_MARK}{name}{_MARK}" for name in _DIFFER}
    output: dict[str, Any] = {
        **{"name": f"{case.layer or 'logits'}:0", "passed": gap["passed"], "reason": gap["message"]},
        **{"dtype": "float32", "shape": [1, 8, 8, 8], "reference_dtype": "float32", "reference_shape": [1, 8, 8, 8]},
        **{"tolerance": StoredTolerance(rtol=1.3e-06, atol=1e-05), "blind": False, "noise": None, "elements": 512},
        **{"mismatches": gap["mismatches"], "nonfinite": 0, "masked": 0, "max_abs": gap["max_abs"]},
        **{"max_rel": 1.978430853731749e-06, "max_ulp": 27, "mean_abs": 3.4552067518234254e-08},
        **{"rmse": 4.807735741037871e-08, "cosine": 0.999999999999997, "sqnr_db": 136.8168817005193},
        **{"first_index": None, "first_values": None, "worst_index": None, "worst_values": None, "mismatch_share": 0.0},
    }
    timings = {"import_s": 0.0038461699, "compile_s": 0.4340136717647136, "push_s": 0.0049628920, "load_s": 0.01315777}
    timings |= {
        "warmup_s": 0.0021,
        "run_s": gap["run_s"],
        "fetch_s": 4.1455e-05,
        "refer_s": 0.0396,
        "compare_s": 0.0005,
    }
    again = f"hil suite run @models --flow {flow} --filter ={case.name} --board {board}"
    record = CaseRecord(
        id=case.name,
        model=case.model,
        suite="models",
        flow=flow,
        runtime=runtime,
        outcome=gap["outcome"],
        ended=gap["outcome"],
        layer=case.layer,
        op=case.op,
        board=board,
        hw_type=hw_type,
        stage="compare",
        message=gap["message"],
        detail=gap["detail"],
        timings=timings,
        device_p50_ns=gap["p50"],  # type: ignore[arg-type]
        device_p90_ns=gap["p90"],  # type: ignore[arg-type]
        iterations=20,
        artifact_bytes=case.bytes,
        program=f"blake3:{case.number:064x}",
        cached=False,
        placement=[StoredPart(device="local-task")],
        outputs=[StoredComparison(**output)],
        against="onnxruntime 1.31.1 CPU",
        repeat=again,
        diff=gap["diff"],
        folder=f"cases/{case.name}",
        started=gap["started"],  # type: ignore[arg-type]
        content=f"blake3:{case.number + 1:064x}",
    )
    text = json.dumps(record.to_json()).replace("%", "%%")
    for name in _DIFFER:
        text = text.replace(json.dumps(gap[name]), f"%({name})s")
    return text + "\n"


def write_session(
    folder: Path, number: int, passed: float, cases: list[Case], end: float, *, target: int | None = None
) -> bool:
    """Write a session unless it exists. The directory appears when it is complete."""
    if folder.exists():
        return False
    rng = random.Random(number)
    begun = end - YEAR_S * (1 - passed)
    part = folder.with_name(f".{folder.name}")
    part.mkdir(exist_ok=True)
    target = number % len(TARGETS) if target is None else target
    lines = list(_lines(target, passed, cases, begun, rng))
    (part / LINES).write_text("".join(lines))
    head = _head(folder.name, number, target, cases, begun, rng)
    (part / HEAD).write_text(json.dumps(head, indent=1))
    part.rename(folder)
    return True


def _lines(target: int, passed: float, cases: list[Case], begun: float, rng: random.Random) -> Iterator[str]:
    # The speed differs slightly between boards of one kind, and from day to day.
    day = rng.gauss(1, 0.004) * (1 + 0.01 * target)
    for place, case in enumerate(cases):
        time_ns = case.usual_ns * day * rng.gauss(1, 0.01)
        if rng.random() < 0.005:
            time_ns *= rng.uniform(1.1, 1.6)
        outcome = rng.choices(_OUTCOMES, _SHARES)[0]
        for change in case.changes:
            if passed >= change.begins:
                time_ns *= change.factor
                outcome = change.outcome or outcome
        yield case.form(target) % _filled(case, outcome, time_ns, begun + 0.4 * place, rng)


_OUTCOMES = ("PASS", "XFAIL", "FAIL", "SKIP", "COMPILE_ERROR", "RUN_CRASH", "TIMEOUT", "BOARD_LOST")
_SHARES = (0.972, 0.012, 0.007, 0.004, 0.003, 0.001, 0.0007, 0.0003)
_MESSAGES = {
    "COMPILE_ERROR": "iree-compile ended with exit code 1: failed to legalize operation 'torch.operator'",
    "RUN_CRASH": "the worker ended with SIGSEGV after {} ms",
    "TIMEOUT": "the run took longer than 60 s",
    "BOARD_LOST": "the board did not answer for 30 s",
    "SKIP": "the flow does not have this operator",
}


def _filled(case: Case, outcome: str, time_ns: float, started: float, rng: random.Random) -> dict[str, Any]:
    compared = outcome in ("PASS", "FAIL", "XFAIL")
    wrong = rng.randrange(1, 512) if compared and outcome != "PASS" else 0
    worst = rng.uniform(0.1, 2) if wrong else case.max_abs
    message = f"{wrong} of 512 elements of {case.layer}:0 differ, by {worst:.3g} at most" if wrong else ""
    message = message or _MESSAGES.get(outcome, "").format(rng.randrange(1000))
    timed = round(time_ns) if compared else "null"
    return {
        "outcome": json.dumps(outcome),
        "message": json.dumps(message),
        "detail": json.dumps(_DETAIL if outcome == "COMPILE_ERROR" else ""),
        "passed": "false" if wrong else "true",
        "mismatches": wrong,
        "max_abs": repr(worst),
        "p50": timed,
        "p90": round(time_ns * 1.02) if compared else "null",
        "run_s": f"{time_ns * 22e-9:.6f}",
        "started": f"{started:.3f}",
        "diff": json.dumps(f"hil diff {case.name}" if wrong else ""),
    }


_DETAIL = (
    "model.mlir:37:12: error: failed to legalize operation 'torch.operator' that was explicitly marked illegal\n" * 6
)


def _head(name: str, number: int, target: int, cases: list[Case], begun: float, rng: random.Random) -> dict[str, Any]:
    flow, runtime, board, hw_type = (*TARGETS, _LARGE)[target]
    step = number // len(TARGETS)
    ids = [case.name for case in cases]
    versions = {"hil": "0.1.0", "python": "3.11.7", "onnx": "1.23.2", "onnxruntime": f"1.{28 + step // 200}.0"}
    versions |= {"iree-base-compiler": f"3.{9 + step // 100}.0", "executorch": f"1.{step // 300}.0", "numpy": "2.4.6"}
    origin = {
        "labels": ["nightly" if step % 3 else "release", f"team-{step % 7}"],
        "branch": "main" if rng.random() < 0.85 else f"feature-{step % 23}",
        "commit": f"{random.Random(step).getrandbits(160):040x}",
    }
    return {
        **{"schema": 1, "request": {"source": "@models", "flow": flow, "boards": [board], "hw_type": ""}, "id": name},
        **{"source": "@models", "suite": "models", "flow": flow, "runtime": runtime, "boards": [board]},
        **{"command": f"hil suite run --resume {name}"},
        **{"again": f"hil suite run @models --flow {flow} --board {board}"},
        **{"origin": origin, "versions": versions, "ids": ids, "suite_ids": ids, "expected": "", "left_out": []},
        **{"interrupted": False, "started": begun, "finished": begun + 0.4 * len(cases), "exit_code": 1},
        "board_info": {board: {"name": board, "machine": {"arch": "aarch64", "cpu_model": hw_type, "cores": 4}}},
    }
