"""Format the texts of failed tests, and the commands for the next step."""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from hil.compare.verdict import Verdict
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.records.evidence import format_evidence, format_reference
from hil.controller.pipeline.records.print_case import print_verdict
from hil.controller.pipeline.records.record import record_verdict
from hil.controller.records.outputs import format_placement, list_placement_reasons
from hil.controller.records.suite import CaseRecord
from hil.core.text import escape_controls
from hil.testing.pytest_plugin.options import rename_for_pytest

_WIDTH = 100
_DETAIL_LINES = 12


def describe_failure(case: Case, record: CaseRecord, *, again: bool = False) -> str:
    """Describe a case that did not pass. The first line contains outcome and reason, for pytest's summary.

    Args:
        again: Return only the first line, because another test has already reported this error.
    """
    text = record.message if record.outcome == "FAIL" else f"{record.outcome}: {record.message}"
    text += f" ({record.confirmed})" if record.confirmed else ""
    facts = [f"  {line}" for line in format_evidence(record)]
    if case.error is None:
        verdicts = [*case.verdicts, *([case.plain_verdict] if case.plain_verdict is not None else [])]
        hint = [f"  hint: {record.hint}"] if record.hint else []
        return "\n".join([describe_mismatch(verdicts, text), *map(escape_controls, [*facts, *hint])])
    if again:
        return escape_controls(text)
    lines = [text, f"  stage: {record.stage}", f"  board: {case.error.board or record.board or record.hw_type}"]
    detail = record.detail.strip().splitlines()
    if len(detail) > _DETAIL_LINES:
        half = _DETAIL_LINES // 2
        detail = [*detail[:half], f"... {len(detail) - 2 * half} more lines ...", *detail[-half:]]
    lines += [f"    {line}" for line in detail]
    lines += facts
    if record.hint:
        lines.append(f"  hint: {record.hint}")
    return escape_controls("\n".join(lines))


def describe_mismatch(verdicts: Sequence[Verdict], reason: str) -> str:
    """Return a reason, followed by the statistics of each output."""
    from hil.controller.storage.screen.console import Console

    screen = io.StringIO()
    for verdict in verdicts:
        print_verdict(Console(file=screen, width=_WIDTH, color_system=None), record_verdict(verdict))
    return rename_for_pytest("\n".join([reason, *(line.rstrip() for line in screen.getvalue().splitlines())]))


def explain_expected(record: CaseRecord) -> str:
    """Return why a case was expected to fail."""
    expectation = record.expectation
    issue = f" ({expectation['issue']})" if expectation.get("issue") else ""
    return escape_controls(f"{record.ended}: {expectation['reason']}{issue}")


def format_commands(record: CaseRecord, here: Path, out: Path = Path(), link: str = "") -> str:
    """Return the commands that repeat a failure and show the difference, and the paths of tensors, logs and IR.

    Args:
        here: Current directory. Paths are relative to it.
        out: Base directory of paths in ``record.directories``.
        link: URL of the case in `hil web`, or "".
    """
    lines = [repeat(record.repeat)]
    if record.diff:
        lines.append(f"see the diff:  {_relativize_diff(here, record.diff, record.folder)}")
    if record.folder and Path(record.folder).exists():
        lines.append(f"stored in:     {format_path(here, record.folder)}")
    for what, where in record.directories.items():
        lines.append(f"{what + ':':<14} {format_path(here, os.path.normpath(out / where))}")
    if link:
        lines.append(f"open:          {link}")
    return "\n".join(lines)


def repeat(command: str) -> str:
    """Return the line with the command that repeats a failure."""
    return f"repeat it:     {command}"


def format_path(here: Path, path: str) -> str:
    """Return a path relative to a directory, quoted for a shell."""
    return shlex.quote(_make_relative(here, path))


def list_properties(record: CaseRecord) -> list[tuple[str, object]]:
    """Return the JUnit properties of a case: outcome, board, and the time of each stage."""
    named: dict[str, object] = {
        "outcome": record.outcome,
        "stage": record.stage,
        "flow": record.flow,
        "runtime": record.runtime,
        "confirmed": record.confirmed,
        "board": record.board,
        "hw_type": record.hw_type,
        "op": record.op,
        **record.timings,
        "device_p50_ns": record.device_p50_ns,
        "placement": format_placement(record.placement),
        "placement_reasons": "; ".join(list_placement_reasons(record.placement, record.runtime)),
        "elsewhere": record.elsewhere,
        "disagreement": record.disagreement,
        "reference": format_reference(record.against, record.relation),
        "decided_by": record.decided_by,
        "evidence": "; ".join(format_evidence(record)),
        "device_cold": record.cold or None,
        "iterations": record.iterations or None,
        "grade": record.grade and record.grade.text,
        "answers": record.answers,
        "agentless": record.agentless,
    }
    if record.outcome not in ("PASS", "XFAIL"):
        named |= {"repeat": record.repeat}
    return [(f"hil_{name}", value) for name, value in named.items() if value not in (None, "")]


def _relativize_diff(here: Path, diff: str, folder: str) -> str:
    """Return the command that shows a difference, with relative paths. The picture goes to the case's directory."""
    words = shlex.split(diff)
    words[-1] = str(Path(folder) / words[-1])
    return shlex.join(_make_relative(here, word) for word in words)


def _make_relative(here: Path, path: str) -> str:
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
