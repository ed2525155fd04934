"""Print a reduction."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from hil.controller.records.decisions.reduce import ReduceRecord
from hil.controller.storage.paths import is_file
from hil.controller.storage.screen.console import Console
from hil.controller.workloads.reduce.candidates.mlir_parts import MLIR_MODEL
from hil.controller.workloads.reduce.candidates.parts import MODEL
from hil.controller.workloads.reduce.result import BUNDLE, REPORT


def _add_path(command: str) -> str:
    """Return a command that finds the tools of this Python environment, also if the environment is not active."""
    tools = str(Path(sys.executable).parent)
    if tools in os.environ.get("PATH", "").split(os.pathsep):
        return command
    return f'PATH={shlex.quote(tools)}:"$PATH" {command}'


def print_reduction(record: ReduceRecord) -> None:
    """Print the failure, the sizes, and the files of the result."""
    out = Console()
    failure = record.failure
    assert failure is not None
    title = failure.outcome.value if record.slow is None else "SLOW"
    lines = [f"{title}  {record.model}  {record.runtime} on {record.board}", f"  {failure.reason}"]
    if record.nodes_after:
        operators = ", ".join(dict.fromkeys(record.operators))
        lines.append(f"  reduced      {record.nodes_before} to {record.nodes_after} nodes: {operators}")
    if failure.time_ns and (time_ns := record.trials[-1].time_ns):
        lines.append(f"  time         {time_ns / 1e6:.4g} ms, {time_ns / failure.time_ns:.0%} of the whole model")
    lines.append(f"  runs         {len(record.trials)} of at most {record.max_runs}")
    lines += [f"  note         {note}" for note in record.notes]
    where = shlex.quote(record.folder)
    files = [name for name in (MODEL, MLIR_MODEL, REPORT, BUNDLE) if is_file(Path(record.folder) / name)]
    lines.append(f"  result       {where}: {', '.join(files)}" if record.nodes_after else f"  log          {where}")
    if record.stock:
        lines.append(f"  repeat       cd {where} && {_add_path(record.stock)}")
    for line in lines:
        out.print(line, highlight=False, markup=False, soft_wrap=True)
