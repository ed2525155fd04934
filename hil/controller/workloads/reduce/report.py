"""Write a bug report in Markdown."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.pipeline.case import Case
from hil.controller.records.decisions.reduce import ReduceRecord
from hil.core import own_version
from hil.core.installed import get_version
from hil.core.results import Outcome
from hil.core.tensors import Array

_ELEMENTS = 10
_LINES = 60
_PACKAGES = ("onnx", "onnxruntime", "iree-base-compiler", "iree-base-runtime", "numpy")


def write_report(record: ReduceRecord, case: Case, text: str, stock: Sequence[str], files: Mapping[str, str]) -> str:
    """Return the report.

    Args:
        case: the run of the smallest model.
        text: the smallest model as text.
        stock: lines on how to reproduce the failure without hil.
        files: name -> description of the files next to the report.
    """
    outcome = case.outcome.value if case.outcome else ""
    runtime = case.artifact.compiler if case.artifact and case.artifact.compiler != "none" else record.runtime
    found = f"this model of {record.nodes_after} node{'s' * (record.nodes_after != 1)} in `{Path(record.model).name}`"
    whole = f"which has {record.nodes_before} nodes"
    time_ns, whole_ns = record.trials[-1].time_ns, record.failure.time_ns if record.failure else None
    if time_ns is not None and whole_ns is not None:
        parts = [f"# Slow: {_list_operators(record.operators)} ({runtime})", ""]
        parts += [f"{time_ns / 1e6:.4g} ms per iteration, {time_ns / whole_ns:.0%} of the whole model.", ""]
        parts.append(f"`hil reduce` found {found}, {whole} and takes {whole_ns / 1e6:.4g} ms.")
    else:
        parts = [f"# {outcome}: {_list_operators(record.operators)} ({runtime})", "", f"{_join_lines(case.reason)}", ""]
        parts.append(f"`hil reduce` found {found}, {whole} and fails in the same way.")
    parts += ["", "## Reproduce", "", *stock, ""]
    parts += _compare_outputs(case)
    detail = case.error.detail if case.error is not None else ""
    if detail.strip():
        parts += ["## Error", "", *_block(detail), ""]
    parts += ["## Model", "", *_block(text), ""]
    parts += [
        "## Environment",
        "",
        *(f"- {name}: {_join_lines(value)}" for name, value in _list_environment(record, case)),
        "",
    ]
    parts += ["## Files", "", *(f"- `{name}`: {what}" for name, what in files.items()), ""]
    if record.notes:
        parts += ["## Notes", "", *(f"- {_join_lines(note)}" for note in record.notes), ""]
    return "\n".join(parts)


def _list_operators(operators: Sequence[str]) -> str:
    shown = list(dict.fromkeys(operators))
    return ", ".join(shown[:5]) + (", ..." if len(shown) > 5 else "")


def _compare_outputs(case: Case) -> list[str]:
    """Return a table with the first elements that differ, for every wrong output."""
    if case.outcome not in (Outcome.FAIL, Outcome.UNSTABLE) or case.result is None or not case.verdicts:
        return []
    lines = ["## Expected and actual outputs", ""]
    given, wanted = case.result.outputs, case.references[0].outputs
    if given.keys() != wanted.keys():  # the program has no output names, so outputs are in the model's order
        given = dict(zip(wanted, given.values(), strict=False))
    for found in case.verdicts[0].outputs:
        if found.passed or found.name not in given or found.name not in wanted:
            continue
        lines += [f"Output `{found.name}`, {found.dtype} {list(found.shape)}: {_join_lines(found.reason)}", ""]
        lines += _list_first_differences(given[found.name], wanted[found.name])
    return [*lines, f"Expected outputs are from {case.references[0].source}.", ""]


def _list_first_differences(actual: Array, expected: Array) -> list[str]:
    if actual.shape != expected.shape or actual.dtype.kind not in "fiub":
        return []
    with np.errstate(all="ignore"):
        equal = (actual == expected) | (np.isnan(actual.astype(np.float64)) & np.isnan(expected.astype(np.float64)))
        close = equal | np.isclose(actual.astype(np.float64), expected.astype(np.float64), rtol=1e-4, atol=1e-6)
    places = np.flatnonzero(~close.reshape(-1))[:_ELEMENTS]
    if not len(places):
        places = np.flatnonzero(~equal.reshape(-1))[:_ELEMENTS]
    lines = ["| index | expected | actual |", "|---|---|---|"]
    for place in places.tolist():
        index = ", ".join(map(str, np.unravel_index(place, actual.shape)))
        lines.append(f"| {index} | {expected.reshape(-1)[place]} | {actual.reshape(-1)[place]} |")
    return [*lines, ""]


def _list_environment(record: ReduceRecord, case: Case) -> list[tuple[str, str]]:
    provenance: Mapping[str, Any] = case.result.provenance if case.result else {}
    found = [("board", f"{record.board} ({record.hw_type})")]
    for name in ("runtime", "runtime_version", "device", "agent_version"):
        if provenance.get(name):
            found.append((name.replace("_", " "), str(provenance[name])))
    if case.artifact is not None:
        found.append(("compiler", case.artifact.compiler))
        found.append(("compiler flags", " ".join(case.artifact.flags) or "none"))
    found.append(("host", f"{platform.platform()}, Python {platform.python_version()}"))
    return [*found, ("packages", ", ".join(_list_packages())), ("hil", own_version())]


def _list_packages() -> Iterator[str]:
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            yield f"{name} {get_version(name)}"


def _block(text: str) -> list[str]:
    """Return text as an indented code block. Unlike a fenced block, no content can end it."""
    lines = text.strip("\n").splitlines()
    more = [f"... {len(lines) - _LINES} more lines"] if len(lines) > _LINES else []
    return [f"    {line[:300]}" for line in [*lines[:_LINES], *more]]


def _join_lines(text: str) -> str:
    return " ".join(text.split())
