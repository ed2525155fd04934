"""Hints for outcomes that are no errors: what to try next, by the records of cases and verdicts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from hil.compare.tolerance import DEFAULT_TOLERANCES

_DEFAULT = vars(DEFAULT_TOLERANCES["float32"])


def hint_for_case(case: Mapping[str, Any]) -> str:
    """Return what to try after a case that did not pass; "" if nothing is known to help."""
    outcome = case["outcome"]
    if case["error"]:
        return str(case["error"].get("hint", ""))
    if outcome == "UNSTABLE" and case.get("repetition"):
        return hint_for_unstable(case["repetition"])
    decisive = [verdict for verdict in case["verdicts"] if verdict["outcome"] == outcome]
    if outcome == "BLIND" and decisive:
        return hint_for_blind(decisive[0])
    failed = [output for verdict in decisive for output in verdict["outputs"] if not output["passed"]]
    if outcome == "FAIL" and failed and _may_declare(case) and all(map(_looks_rounded, failed)):
        return (
            "most values are off by little: if the board computes in float16 or bfloat16, declare it with --arithmetic"
        )
    return ""


def hint_for_blind(verdict: Mapping[str, Any]) -> str:
    """Return what to try after a BLIND verdict."""
    names = [output["name"] for output in verdict["outputs"] if not output["passed"]]
    allow = _for_each("--allow-blind", names) or "--allow-blind=OUTPUT"
    return f"try other inputs (such as another --seed) or criteria (--accept); {allow} passes without a judgement"


def _may_declare(case: Mapping[str, Any]) -> bool:
    """Return whether declaring an arithmetic changes the verdict: only ONNX models are computed in one on the host."""
    is_onnx = (case["model"] or {}).get("format") == "onnx"
    return is_onnx and not case["provenance"].get("arithmetic") and not case.get("random")


def _looks_rounded(output: Mapping[str, Any]) -> bool:
    """Return whether the errors of a float32 output are of the size and the spread of rounding to 8 to 11 bits.

    Outputs that a given tolerance or criteria judge do not count: an arithmetic would not change their verdict.
    """
    if output["dtype"] != "float32" or output["tolerance"] != _DEFAULT or output.get("criteria"):
        return False
    found = [output[name] for name in ("mismatch_share", "sqnr_db", "max_abs", "rmse")]
    if None in found:
        return False
    share, sqnr, worst, mean = map(float, found)
    # The digits give 70 dB in float16 and 56 dB in bfloat16. Rounding errs evenly: no value stands out.
    return share >= 0.5 and 40 <= sqnr <= 85 and worst <= 10 * mean


def hint_for_unstable(repetition: Mapping[str, Any]) -> str:
    """Return where answers first differ, and how to narrow the cause down or to allow it."""
    _, *others = repetition["answers"]
    where = f"first differs in iteration {others[0]['first'] + 1}; " if others else ""
    allow = _for_each("--allow-unstable", repetition["differing"])
    allowed = f"; {allow} allows differences within the tolerance" if allow else ""
    return f"{where}--repeat 5 --fresh-load shows whether a freshly loaded program differs too{allowed}"


def _for_each(option: str, names: list[str]) -> str:
    # Many outputs would fill the screen.
    return " ".join(f"{option}={shlex.quote(name)}" for name in names) if len(names) <= 3 else f"{option}='*'"
