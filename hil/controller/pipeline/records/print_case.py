"""Print cases and verdicts of a run's record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET

from hil.compare.random_outputs import format_random
from hil.compare.stats import STATISTICS
from hil.controller.pipeline.instructions import format_counts
from hil.controller.pipeline.records.energy_text import format_energy, format_power, format_token_energy
from hil.controller.pipeline.records.evidence import format_criterion, format_number
from hil.controller.pipeline.records.next_steps import make_case_hint
from hil.controller.pipeline.records.print_generation import print_generation
from hil.controller.records.outputs import (
    StoredComparison,
    StoredControl,
    StoredVerdict,
    format_placement,
    list_placement_reasons,
    list_software_devices,
)
from hil.controller.records.run import CaseError, DeviceStatistics, RunCase
from hil.controller.storage.screen.texts import align_rows, format_seconds, keep_together, print_labelled
from hil.core.results import Outcome
from hil.core.tensors import type_text

if TYPE_CHECKING:
    from rich.console import Console


_DETAIL_SHOWN = 12
_REASONS_SHOWN = 20
_SHOWN = [one for one in STATISTICS if one.column]
_COLUMNS = ["output", "shape", "mismatches", *(one.heading for one in _SHOWN)]
_MIN_NAME_WIDTH = 10
COLOURS = {Outcome.PASS: "green", Outcome.FAIL: "red", Outcome.UNSTABLE: "red"}


def print_case(console: Console, case: RunCase, *, where: str = "") -> None:
    """Print a case's final screen: outcome, statistics of each output, device time, stages, and the run's directory."""
    outcome = case.outcome
    colour = COLOURS.get(outcome, "magenta") if outcome else "magenta"
    title = f"[bold {colour}]{outcome.value if outcome else 'UNFINISHED'}[/]  [bold]{_escape_markup(case.name)}[/]"
    console.print(f"{title}  {_escape_markup(_describe_execution(case))}")
    # If a single verdict decides the outcome, print_verdict prints the reason, and notes describe failed references.
    is_told = case.reason and [one.outcome for one in case.verdicts] != [outcome]
    if is_told:
        print_labelled(console, "", case.reason)
    if case.error:
        _print_error(console, case.stage, case.error)
    for one in () if is_told else case.unanswered:
        print_labelled(console, "note", f"reference {one.reference} failed: {one.reason}")
    if case.generation:
        for verdict in case.verdicts:
            print_labelled(console, "against", verdict.relation.named(verdict.against))
            _print_criteria(console, verdict)
            if verdict.outcome is Outcome.FAIL and not is_told:
                print_labelled(console, "fault" if case.generation.fault else "", verdict.reason, style="red")
        print_generation(console, case.generation)
        if case.peak_memory_bytes:
            print_labelled(console, "memory", f"peak {case.peak_memory_bytes / 2**20:,.0f} MiB")
    else:
        for verdict in case.verdicts:
            print_verdict(console, verdict)
    if case.random and outcome in (Outcome.FAIL, Outcome.BLIND):  # after a pass, the reason includes this text
        print_labelled(console, "note", format_random(case.random))
    _print_provenance(console, case)
    if case.repetition and case.repetition.iterations > 1:
        print_labelled(console, "answers", case.repetition.text)
        if outcome is Outcome.UNSTABLE and not case.generation:
            print_labelled(console, "note", "the tables show the first answer")
    if not case.error and (hint := make_case_hint(case)):
        print_labelled(console, "hint", hint)
    if case.compilations:
        print_labelled(console, "programs", case.compilations.text)
    if case.device and case.device.iterations:
        is_software = case.provenance is not None and list_software_devices(case.provenance.placement)
        kind = "; software device, not a GPU time" if is_software else ""
        print_labelled(console, "device time", _format_device_time(case.device) + kind)
    if case.peak_device_memory_bytes:
        print_labelled(console, "device mem", f"peak {case.peak_device_memory_bytes / 1e6:,.3f} MB")
    if case.instructions:
        print_labelled(console, "instructions", format_counts(case.instructions))
    if case.energy:
        for label, text in (
            ("energy", format_energy(case.energy)),
            ("tokens", format_token_energy(case.energy)),
            ("power", format_power(case.energy)),
        ):
            if text:
                print_labelled(console, label, text)
    if case.grade and case.grade.reasons:
        print_labelled(console, "grade", case.grade.text)
    timings = case.timings.to_json()
    spent = {key[:-2]: format_seconds(value) for key, value in timings.items() if value is not None}
    if spent:
        words = [f"{stage} {text}{' (cached)' if stage in case.cached else ''}" for stage, text in spent.items()]
        print_labelled(console, "host time", ", ".join(map(keep_together, words)))
    for profile in case.profiles:
        for note in profile.notes:
            print_labelled(console, "note", note)
        label = "profile" if profile.kind == "run" else "compiling"
        console.print(f"  {label:<12} {_escape_markup(profile.folder)}", highlight=False, soft_wrap=True)
    if where:
        console.print(f"  stored in    {_escape_markup(where)}", highlight=False, soft_wrap=True)


def _print_provenance(console: Console, case: RunCase) -> None:
    """Print notes on the board, the placement, compiler notes, and the reason for a missing agent."""
    provenance = case.provenance
    if provenance:
        for note in provenance.notes:
            print_labelled(console, "note", note)
        if provenance.elsewhere:
            print_labelled(console, "note", provenance.elsewhere)
        if provenance.placement is not UNSET and provenance.placement is not None:
            where = format_placement(provenance.placement)
            print_labelled(console, "ran on", where or "no device (the model has no nodes)")
        for line in list_placement_reasons(provenance.placement, provenance.runtime):
            print_labelled(console, "why", line)
    if case.artifact and (text := case.artifact.notes.get("text")):
        print_labelled(console, "compiled", text)
    if provenance and (command := provenance.command):
        parts = [command.why, f"not measured: {', '.join(command.not_measured)}"]
        print_labelled(console, "no agent", "; ".join(filter(None, parts)))


def print_verdict(console: Console, verdict: StoredVerdict) -> None:
    """Print a verdict's outputs as a table of at most 80 columns, then the reasons for mismatches."""
    from rich.text import Text

    print_labelled(console, "against", verdict.relation.named(verdict.against) + _describe_tolerance(verdict.outputs))
    if bounds := {_describe_bound(output.control) for output in verdict.outputs if output.control}:
        print_labelled(console, "arithmetic", "; ".join(sorted(bounds)))
    rows = [_COLUMNS, *(_format_row(output) for output in verdict.outputs)]
    # Names get the remaining width of the terminal. If this width is too small, first reduce the gaps between columns,
    # then drop the least informative columns. The record contains all columns.
    room, gap = _compute_name_width(console, rows, 2), 2
    if room < min(_MIN_NAME_WIDTH, max(len(row[0]) for row in rows)):
        gap = 1
        for statistic in reversed([one for one in _SHOWN if one.column == "wide"]):
            if _compute_name_width(console, rows, gap) < _MIN_NAME_WIDTH:
                place = rows[0].index(statistic.heading)
                rows = [[*row[:place], *row[place + 1 :]] for row in rows]
        room = max(_compute_name_width(console, rows, gap), _MIN_NAME_WIDTH)
    names = [_shorten_name(name, room) for name, *_ in rows]
    colours = ["green" if output.passed else "red" for output in verdict.outputs]
    if colours:
        # Do not use a table of rich, which measures a table about three times and takes 1.2 ms.
        lines = align_rows([[name, *rest] for name, (_, *rest) in zip(names, rows, strict=True)], left=2, gap=gap)
        console.print(Text(f"  {next(lines)}", "dim"), soft_wrap=True)
        for line, name, colour in zip(lines, names[1:], colours, strict=True):
            text = Text(f"  {line}")
            text.stylize(colour, 2, 2 + len(name))
            console.print(text, soft_wrap=True)
    _print_criteria(console, verdict)
    failed = [output for output in verdict.outputs if not output.passed]
    for output in failed[:_REASONS_SHOWN]:
        print_labelled(console, "", f"{output.name}: {output.reason}", style="red")
    if len(failed) > _REASONS_SHOWN:
        print_labelled(console, "", f"and {len(failed) - _REASONS_SHOWN} more outputs", style="red")
    if not verdict.outputs and verdict.reason:
        print_labelled(console, "", verdict.reason, style="red")
    if verdict.outcome is Outcome.PASS and verdict.reason:
        print_labelled(console, "note", verdict.reason)


def _print_criteria(console: Console, verdict: StoredVerdict) -> None:
    for output in verdict.outputs:
        for criterion in output.criteria:
            style = "green" if criterion.passed else "red"
            print_labelled(console, "", f"{output.name}: {format_criterion(criterion)}", style=style)


def _describe_bound(control: StoredControl) -> str:
    """Describe the bound that a declared arithmetic set."""
    return (
        f"{control.arithmetic}, bound: {control.factor:g} times the deviation of the model computed in "
        f"{control.arithmetic} ({control.source})"
    )


def _compute_name_width(console: Console, rows: list[list[str]], gap: int) -> int:
    """Return the terminal width that remains for the first column."""
    return console.width - 2 - sum(max(map(len, column)) + gap for column in list(zip(*rows, strict=True))[1:])


def _format_row(output: StoredComparison) -> list[str]:
    """Return an output's row of the table."""
    return [
        output.name.replace("\n", r"\n"),
        type_text(output.dtype, output.shape),
        "-" if output.mismatches is None else f"{output.mismatches} of {output.elements}",
        *(format_number(getattr(output, one.key), one.digits) for one in _SHOWN),
    ]


def _shorten_name(name: str, room: int) -> str:
    """Shorten a wide name in the middle. Reasons and the record contain the complete name."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(name) <= room:
        return name
    tail = room // 4
    return f"{set_cell_size(name, room - 1 - tail)}…{set_cell_size(name[::-1], tail)[::-1]}"


def _describe_tolerance(outputs: Sequence[StoredComparison]) -> str:
    """Describe how outputs are judged: by criteria, or by a tolerance if all outputs have the same tolerance."""
    judged = [output for output in outputs if not output.criteria]
    by_criteria = ", by criteria" if len(judged) < len(outputs) else ""
    if not judged:
        return by_criteria
    first = judged[0].tolerance
    if any(output.tolerance != first for output in judged):
        return f"{by_criteria}, tolerance by dtype"
    if first is None:
        return f"{by_criteria}, exact"
    noise = " with rounding noise" * any(output.noise for output in judged)
    return f"{by_criteria}, rtol {first.rtol:g}, atol {first.atol:g}{noise}"


def _format_device_time(device: DeviceStatistics) -> str:
    count, cold = device.iterations, device.cold_ns
    numbers = {"p50": device.p50_ns, "p90": device.p90_ns, "min": device.min_ns, "stdev": device.stdev_ns}
    shown = {name: format_seconds(value / 1e9) for name, value in numbers.items() if value is not None}
    if count == 1:
        return f"{shown['min']} (1 {'iteration' if cold is None else 'cold iteration'})"
    times = ", ".join(keep_together(f"{name} {text}") for name, text in shown.items())
    if cold is None:
        return f"{times} {keep_together(f'({count} iterations)')}"
    first = f"excludes the cold first iteration: {format_seconds(cold / 1e9)}"
    return f"{times} ({keep_together(f'{count} iterations')}; {first})"


def _describe_execution(case: RunCase) -> str:
    artifact, provenance = case.artifact, case.provenance
    if not artifact:
        return ""
    board = (provenance and provenance.board) or (case.error and case.error.board)
    words = (artifact.runtime, provenance and provenance.runtime_version, board and f"on {board}")
    without = ", without an agent" if provenance and provenance.command else ""
    return " ".join(word for word in words if word) + without


def _print_error(console: Console, stage: str, error: CaseError) -> None:
    print_labelled(console, "stage", stage + (f" on board {error.board}" if error.board else ""))
    lines = error.detail.strip().splitlines()
    if len(lines) > _DETAIL_SHOWN:
        # Show both ends: Python reports a crash at the start of the output, other programs at the end.
        half = _DETAIL_SHOWN // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} more lines in run.json ...", *lines[-half:]]
    for line in lines:
        print_labelled(console, "", line, style="dim", indent=4, whole=True)
    if error.hint:
        print_labelled(console, "hint", error.hint, whole=True)


def _escape_markup(text: str) -> str:
    from rich.markup import escape

    return escape(text)
