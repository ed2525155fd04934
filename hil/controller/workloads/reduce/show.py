"""Print a reduction."""

from __future__ import annotations

import shlex

from hil.controller.records.reduce import ReduceRecord
from hil.controller.storage.screen.console import Console
from hil.controller.workloads.reduce.result import BUNDLE, REPORT


def print_reduction(record: ReduceRecord) -> None:
    """Print the failure, the sizes, and the files of the result."""
    out = Console()
    failure = record.failure
    assert failure is not None
    lines = [f"{failure.outcome.value}  {record.model}  {record.runtime} on {record.board}", f"  {failure.reason}"]
    if record.nodes_after:
        operators = ", ".join(dict.fromkeys(record.operators))
        lines.append(f"  reduced      {record.nodes_before} to {record.nodes_after} nodes: {operators}")
    lines.append(f"  runs         {len(record.trials)} of at most {record.max_runs}")
    lines += [f"  note         {note}" for note in record.notes]
    where = shlex.quote(record.folder)
    lines.append(
        f"  result       {where}: model.onnx, {REPORT}, {BUNDLE}" if record.nodes_after else f"  log          {where}"
    )
    if record.stock:
        lines.append(f"  repeat       cd {where} && {record.stock}")
    for line in lines:
        out.print(line, highlight=False, markup=False, soft_wrap=True)
