"""Estimate the cycles of a TFLite model on an Arm Ethos-U NPU with Vela, Arm's compiler for these NPUs."""

from __future__ import annotations

import csv
import glob
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hil.controller.records.commands.npu import NpuEstimate, NpuOperator
from hil.controller.storage.sources.packages import require_version
from hil.core.files import open_file, read_text
from hil.core.install_hints import make_install_command
from hil.core.scratch import make_temporary_folder
from hil.errors import CompileFailed, StageTimeout, UsageError

PACKAGE, EXTRA = "ethos-u-vela", "vela"
ACCELERATORS = (
    *("ethos-u55-32", "ethos-u55-64", "ethos-u55-128", "ethos-u55-256", "ethos-u65-256", "ethos-u65-512"),
    *("ethos-u85-128", "ethos-u85-256", "ethos-u85-512", "ethos-u85-1024", "ethos-u85-2048"),
)
SUFFIX, _MAGIC = ".tflite", b"TFL3"
_SECONDS = 300.0
_SHOWN_LINES = 20
_MAX_BYTES = 64 << 20
_CPU = "CPU"
_COLUMNS = ("Original Operator", "Target", "Op Cycles", "MAC Count", "Name")
# `operator: SOFTMAX, ofm: 'y'`, and the reason in the following lines until an empty line.
_WARNING = re.compile(r"^Warning \([^)]*\) operator: \S+, ofm: '(?P<name>.*)'\n(?P<reason>(?:.+\n?)*)", re.M)
_REASON = re.compile(r"^(?: *- )?Reason: *")
# Vela splits a softmax into operators with names like `x_softmax_12`.
_PART = re.compile(r"_softmax_\d+(?:_broadcasted)?$")
NO_REASON = "Vela reports no reason"


def estimate_cycles(model: Path, accelerator: str) -> NpuEstimate:
    """Return Vela's estimate for a TFLite model.

    Raises:
        UsageError: the file is not a TFLite model, or Vela is not installed.
        CompileFailed: Vela does not accept the model.
        StageTimeout: Vela did not finish in time.
    """
    _check_model(model)
    version = require_version(PACKAGE, EXTRA)
    with make_temporary_folder("hil-vela-") as name:
        folder = Path(name)
        printed = _run_vela(model, accelerator, folder)
        stem = glob.escape(model.stem)
        rows = _read_table(folder, f"{stem}_per-layer.csv")
        summary = next(iter(_read_table(folder, f"{stem}_summary_*.csv")), {})
    try:
        operators = _merge_rows(rows, _read_reasons(printed))
        return NpuEstimate(
            model=str(model),
            vela=version,
            accelerator=accelerator,
            system_config=summary["system_config"],
            memory_mode=summary["memory_mode"],
            clock_hz=float(summary["core_clock"]),
            cycles=int(float(summary["cycles_total"])),
            npu_operators=sum(one.device == "npu" for one in operators),
            cpu_operators=sum(one.device == "cpu" for one in operators),
            sram_bytes=round(float(summary["sram_memory_used"]) * 1024),
            operators=operators,
        )
    except (KeyError, OverflowError, ValueError) as error:
        raise _make_format_error(version) from error


def _check_model(model: Path) -> None:
    with open_file(model) as file:
        head = file.read(8)
    if head[4:] != _MAGIC:
        raise UsageError(
            f"{model} is not a TFLite model, and Vela accepts only TFLite models",
            hint="convert the model to an int8 TFLite file; for TensorFlow models, hil compile MODEL --runtime tflite "
            "writes such a file",
        )


def _run_vela(model: Path, accelerator: str, folder: Path) -> str:
    """Run Vela, and return what it printed."""
    options = [f"--accelerator-config={accelerator}", "--verbose-performance", "--show-cpu-operations"]
    command = [sys.executable, "-m", "ethosu.vela", str(model.absolute()), *options, f"--output-dir={folder}"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StageTimeout(f"Vela did not finish within {_SECONDS:g} s") from error
    printed = done.stdout.decode(errors="replace")
    if done.returncode:
        lines = [line.strip() for line in printed.splitlines() if line.strip()]
        wrong = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "")
        what = wrong[:300] or f"exit code {done.returncode}"
        raise CompileFailed(f"Vela rejected {model.name}: {what}", detail="\n".join(lines[-_SHOWN_LINES:]))
    return printed


def _read_table(folder: Path, pattern: str) -> list[dict[str, str]]:
    for path in folder.glob(pattern):
        return list(csv.DictReader(read_text(path, _MAX_BYTES).splitlines()))
    raise _make_format_error(require_version(PACKAGE, EXTRA))


def _make_format_error(version: str) -> CompileFailed:
    return CompileFailed(f"unsupported output of Vela {version}", hint=make_install_command(EXTRA))


def _read_reasons(printed: str) -> Mapping[str, str]:
    """Return output tensor -> reason for the CPU, from Vela's warnings."""
    reasons: dict[str, str] = {}
    for found in _WARNING.finditer(printed):
        lines = [_REASON.sub("", line).strip() for line in found["reason"].splitlines()]
        reasons[found["name"]] = "; ".join(filter(None, lines))
    return reasons


def _merge_rows(rows: Sequence[Mapping[str, str]], reasons: Mapping[str, str]) -> list[NpuOperator]:
    """Return the operators of the model. If Vela splits an operator, the table has a row per part."""
    groups: list[list[Mapping[str, str]]] = []
    for row in rows:
        if missing := [name for name in _COLUMNS if name not in row]:
            raise KeyError(missing[0])
        if groups and _is_same_operator(groups[-1][-1], row):
            groups[-1].append(row)
        else:
            groups.append([row])
    whole = sum(int(row["Op Cycles"]) for row in rows if row["Target"] != _CPU)
    return [_make_operator(group, whole, reasons) for group in groups]


def _is_same_operator(before: Mapping[str, str], row: Mapping[str, str]) -> bool:
    """Return True if Vela made both rows of one operator."""
    if before["Original Operator"] != row["Original Operator"] or before["Target"] != row["Target"]:
        return False
    return before["Name"] == row["Name"] or bool(_PART.search(before["Name"]))


def _make_operator(rows: Sequence[Mapping[str, str]], whole: int, reasons: Mapping[str, str]) -> NpuOperator:
    last = rows[-1]
    name, on_cpu = last["Name"], last["Target"] == _CPU
    cycles = None if on_cpu else sum(int(row["Op Cycles"]) for row in rows)
    return NpuOperator(
        name=name,
        op_type=last["Original Operator"],
        device="cpu" if on_cpu else "npu",
        cycles=cycles,
        share=None if cycles is None else cycles / whole if whole else 0.0,
        macs=sum(int(row["MAC Count"]) for row in rows),
        reason=reasons.get(name, NO_REASON) if on_cpu else "",
    )
