"""Write nightly suite runs on several boards, with planted causes of failures and slower cases."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.web import write_record, write_suite

DAY = 86400.0
# Midnight of 2023-11-15, plus three hours.
FIRST_NIGHT = 19676 * DAY + 3 * 3600
BOARDS = ("evk1", "evk2", "rpi5")
OPS = ("Conv", "Gemm", "Relu", "Softmax")
MODELS = ("digits", "faces")
# Night of each planted cause, from 0.
SLOW_BOARD, WRONG_LAYER, NEW_COMPILER = 5, 7, 8


def list_cases() -> list[tuple[str, str, str]]:
    """Return model, operator and name of each case. Whole models have no operator."""
    layers = [(model, op, f"{model}_layer_{op}_{number}") for model in MODELS for op in OPS for number in (1, 2)]
    return [*layers, *((model, "", f"{model}_full_model") for model in MODELS)]


def write_nights(root: Path, nights: int = 12, *, boards: Sequence[str] = BOARDS, since: float = FIRST_NIGHT) -> None:
    """Write nights with three causes.

    - evk1 is 1.14 times slower from night SLOW_BOARD on.
    - Conv_1 of the model digits, and the whole model, fail from night WRONG_LAYER on; a bisection names the layer.
    - A new compiler breaks Softmax on all boards from night NEW_COMPILER on.
    """
    rolled = random.Random(3)
    for number in range(nights):
        for board in boards:
            cases = [_make_case(one, board, number, rolled) for one in list_cases()]
            version = "3.13.0" if number < NEW_COMPILER else "3.14.0"
            write_suite(
                root,
                f"{board}-{number:02d}",
                cases,
                suite="nets",
                boards=[board],
                started=since + number * DAY,
                versions={"iree-base-compiler": version, "host": f"Linux {number}"},
                origin={"commit": f"{number:040x}", "branch": "main", "labels": [f"night-{number}"]},
            )
    if nights > WRONG_LAYER:
        layers = [("stem", "PASS"), ("conv1", "FAIL"), ("fc1", "FAIL")]
        write_record(
            root / "bisect" / "bisect.json",
            {
                "model": "nets/digits.onnx",
                "board": boards[-1],
                "created": since + (WRONG_LAYER + 0.2) * DAY,
                "layers": [{"name": name, "op": "Conv", "isolated": {"outcome": word}} for name, word in layers],
            },
        )


def _make_case(case: tuple[str, str, str], board: str, night: int, rolled: random.Random) -> dict[str, Any]:
    model, op, name = case
    wrong = model == "digits" and (name.endswith("Conv_1") or not op) and night >= WRONG_LAYER
    broken = op == "Softmax" and night >= NEW_COMPILER
    outcome = "COMPILE_ERROR" if broken else "FAIL" if wrong else "PASS"
    time = 1e5 * rolled.gauss(1, 0.004) * (1.14 if board == "evk1" and night >= SLOW_BOARD else 1.0)
    found = {"id": name, "model": model, "op": op, "board": board, "outcome": outcome, "ended": outcome}
    found |= {"message": "" if outcome == "PASS" else f"{name}: wrong"}
    timed = {} if broken else {"device_p50_ns": time, "device_p90_ns": time * 1.01, "iterations": 20}
    return found | timed
