"""Write and print the record of a run: the cases in run.json."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hil.compare.random_outputs import random_text
from hil.compare.stats import STATISTICS
from hil.compare.verdict import Verdict, deciding
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.records.evidence import criterion_text, format_number
from hil.controller.pipeline.records.next_steps import hint_for_case
from hil.controller.pipeline.verdicts.repetition import worst_answer
from hil.controller.storage.runs import Run
from hil.controller.storage.screen.texts import aligned, say, seconds, together
from hil.core.results import NEVER_IN, Outcome, Relation, RunResult, exit_code_of, placement_text
from hil.core.tensors import TensorSpec, type_text
from hil.core.text import jsonable
from hil.errors import EXIT_INTERRUPTED, StorageError

if TYPE_CHECKING:
    from rich.console import Console


_SAMPLES_KEPT = 10_000
_DETAIL_SHOWN = 12
_REASONS_SHOWN = 20
_SHOWN = [one for one in STATISTICS if one.column]
_COLUMNS = ["output", "shape", "mismatches", *(one.heading for one in _SHOWN)]
_NAME_LEAST = 10


def device_statistics(result: RunResult) -> dict[str, Any]:
    """Return statistics of the device time in nanoseconds.

    The statistics contain iterations, p50, p90, min, mean, stdev and at most 10,000 samples.

    A cold iteration, the program's first after loading, is reported separately (``cold_ns``, else None). It is excluded
    from the statistics unless it is the only iteration.
    """
    samples = result.device_ns
    if not samples:
        return {"iterations": 0}
    ordered = sorted(samples[1:] if result.cold and len(samples) > 1 else samples)
    count = len(ordered)
    return {
        "iterations": len(samples),
        "cold_ns": samples[0] if result.cold else None,
        "p50_ns": ordered[count // 2] if count % 2 else (ordered[count // 2 - 1] + ordered[count // 2]) / 2,
        "p90_ns": ordered[min(int(0.9 * count), count - 1)],
        "min_ns": ordered[0],
        "mean_ns": sum(ordered) / count,
        "stdev_ns": float(np.std(ordered, ddof=1)) if count > 1 else 0.0,
        "samples_ns": samples[:_SAMPLES_KEPT],
    }


def case_record(case: Case, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return a case's entry for run.json.

    Args:
        tensors: The tensors stored so far: ``inputs``, ... -> entries with files.
    """
    artifact, model, error, result = case.artifact, case.model, case.error, case.result
    stored_references = tensors.get("references") or [[] for _ in case.references]
    return {
        "name": case.name,
        "path": str(case.path),
        "outcome": case.outcome.value if case.outcome else None,
        "stage": case.stage,
        "reason": case.reason,
        "error": error and {"kind": type(error).__name__, **_pick_fields(error, "hint", "board", "detail")},
        "model": model
        and {
            **_pick_fields(model, "format", "digest", "function"),
            "inputs": _record_specs(model.inputs),
            "outputs": _record_specs(model.outputs),
        },
        "artifact": artifact
        and {
            **_pick_fields(artifact, "runtime", "compiler", "flags", "function", "digests"),
            "bytes": sum(path.stat().st_size for path in artifact.files.values() if path.exists()),
            **_pick_fields(artifact, "cached", "notes"),
        },
        "timings": dict(vars(case.timings)),
        "cached": cached_stages(case),
        "pushed_bytes": case.pushed_bytes,
        "device": result and device_statistics(result),
        "repetition": _record_repetition(case),
        "compilations": case.compilations and case.compilations.record(),
        "peak_memory_bytes": result and result.peak_memory_bytes,
        "provenance": dict(result.provenance) if result else {},
        "inputs": tensors.get("inputs", []),
        "outputs": tensors.get("outputs", []),
        "references": [
            {
                "source": reference.source,
                "relation": reference.relation.value,
                "provenance": dict(reference.provenance),
                "outputs": stored,
            }
            for reference, stored in zip(case.references, stored_references, strict=True)
        ],
        "unanswered": [
            {"reference": name, "outcome": why.outcome, "reason": why.message, "detail": why.detail}
            for name, why in case.unanswered.items()
        ],
        "verdicts": [verdict_record(verdict) for verdict in case.verdicts],
        "decided_by": _name_decider(case),
        "disagreement": case.disagreement,
        "random": list(model.random) if model else [],
        "worker_log": case.worker_log[-200:],
        "profiles": case.profiles,
    }


def _record_repetition(case: Case) -> dict[str, Any] | None:
    """Return the record of compared iterations, with verdicts of differing outputs."""
    repetition = case.result.repetition if case.result is not None else None
    if repetition is None:
        return None
    record = repetition.record()
    for number, verdict in case.answer_verdicts.items():
        record["answers"][number]["verdict"] = verdict_record(verdict)
    record["worst"] = worst_answer(case.answer_verdicts) if case.answer_verdicts else None
    return record


def cached_stages(case: Case) -> list[str]:
    """Return the stages whose complete result was cached."""
    sources = [reference.provenance.get("cached", False) for reference in case.references]
    found = {
        "import": case.model is not None and case.model.cached,
        "compile": case.artifact is not None and case.artifact.cached and case.compilations is None,
        "refer": bool(sources) and all(sources),
    }
    return [stage for stage, cached in found.items() if cached]


def verdict_record(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict's record with all statistics."""
    outputs = [{**output.record(), "mismatch_share": output.mismatch_share} for output in verdict.outputs]
    enums = {name: getattr(verdict, name).value for name in ("outcome", "relation")}
    return {**enums, **_pick_fields(verdict, "against", "reason"), "outputs": outputs}


def _name_decider(case: Case) -> str:
    """Return the reference that a pass is based on, with its relation; "" if the case did not pass."""
    decider = deciding(case.verdicts) if case.outcome is Outcome.PASS else None
    return decider.named if decider else ""


def _pick_fields(value: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _record_specs(specs: Sequence[TensorSpec] | None) -> list[dict[str, Any]] | None:
    return None if specs is None else [dict(vars(spec)) for spec in specs]


def print_case(console: Console, case: dict[str, Any], *, where: str = "") -> None:
    """Print a case's final screen: outcome, statistics of each output, device time, stages, and the run's directory."""
    outcome = case["outcome"] or "UNFINISHED"
    colour = {"PASS": "green", "FAIL": "red", "UNSTABLE": "red"}.get(outcome, "magenta")
    name, execution = _escape_markup(case["name"]), _escape_markup(_describe_execution(case))
    console.print(f"[bold {colour}]{outcome}[/]  [bold]{name}[/]  {execution}")
    # If a single verdict determined the outcome, print_verdict prints the reason, and failed references get notes.
    is_told = case["reason"] and [one["outcome"] for one in case["verdicts"]] != [outcome]
    if is_told:
        say(console, "", case["reason"])
    if case["error"]:
        _print_error(console, case)
    for one in () if is_told else case.get("unanswered", ()):
        say(console, "note", f"reference {one['reference']} failed: {one['reason']}")
    for verdict in case["verdicts"]:
        print_verdict(console, verdict)
    if case.get("random") and outcome in ("FAIL", "BLIND"):  # the reason of a pass includes it
        say(console, "note", random_text(case["random"]))
    provenance = case["provenance"]
    for note in (*provenance.get("notes", ()), *filter(None, [provenance.get("elsewhere")])):
        say(console, "note", note)
    if (placement := provenance.get("placement")) is not None:
        say(console, "ran on", placement_text(placement) or "no device (the model has no nodes)")
    if case["artifact"] and (text := case["artifact"].get("notes", {}).get("text")):
        say(console, "compiled", text)
    if command := provenance.get("command"):
        parts = [command.get("why", ""), f"not measured: {', '.join(command['not_measured'])}"]
        say(console, "no agent", "; ".join(filter(None, parts)))
    if (repetition := case.get("repetition")) and repetition["iterations"] > 1:
        say(console, "answers", repetition["text"])
        if outcome == "UNSTABLE":
            say(console, "note", "the tables show the first answer")
    if not case["error"] and (hint := hint_for_case(case)):
        say(console, "hint", hint)
    if compilations := case.get("compilations"):
        say(console, "programs", compilations["text"])
    if case["device"] and case["device"]["iterations"]:
        say(console, "device time", _format_device_time(case["device"]))
    spent = {key[:-2]: seconds(value) for key, value in case["timings"].items() if value is not None}
    if spent:
        cached = case.get("cached", ())
        words = [f"{stage} {text}{' (cached)' if stage in cached else ''}" for stage, text in spent.items()]
        say(console, "host time", ", ".join(map(together, words)))
    for profile in case.get("profiles", ()):
        for note in profile["notes"]:
            say(console, "note", note)
        label = "profile" if profile["kind"] == "run" else "compiling"
        console.print(f"  {label:<12} {_escape_markup(profile['folder'])}", highlight=False, soft_wrap=True)
    if where:
        console.print(f"  stored in    {_escape_markup(where)}", highlight=False, soft_wrap=True)


def print_verdict(console: Console, verdict: dict[str, Any]) -> None:
    """Print a verdict's outputs as a table of at most 80 columns, then the reasons for mismatches."""
    from rich.text import Text

    reference = Relation(verdict.get("relation", "independent")).named(verdict["against"])
    say(console, "against", reference + _describe_tolerance(verdict["outputs"]))
    if bounds := {_describe_bound(output["control"]) for output in verdict["outputs"] if output.get("control")}:
        say(console, "arithmetic", "; ".join(sorted(bounds)))
    rows = [_COLUMNS, *(_format_row(output) for output in verdict["outputs"])]
    # Names get the remaining width of the terminal. If it is too small, first reduce the gaps between columns, then
    # drop the least informative columns. The record contains all of them.
    room, gap = _compute_name_width(console, rows, 2), 2
    if room < min(_NAME_LEAST, max(len(row[0]) for row in rows)):
        gap = 1
        for statistic in reversed([one for one in _SHOWN if one.column == "wide"]):
            if _compute_name_width(console, rows, gap) < _NAME_LEAST:
                place = rows[0].index(statistic.heading)
                rows = [[*row[:place], *row[place + 1 :]] for row in rows]
        room = max(_compute_name_width(console, rows, gap), _NAME_LEAST)
    names = [_shorten_name(name, room) for name, *_ in rows]
    colours = ["green" if output["passed"] else "red" for output in verdict["outputs"]]
    if colours:
        # rich measures a table about three times, which takes 1.2 ms.
        lines = aligned([[name, *rest] for name, (_, *rest) in zip(names, rows, strict=True)], left=2, gap=gap)
        console.print(Text(f"  {next(lines)}", "dim"), soft_wrap=True)
        for line, name, colour in zip(lines, names[1:], colours, strict=True):
            text = Text(f"  {line}")
            text.stylize(colour, 2, 2 + len(name))
            console.print(text, soft_wrap=True)
    for output in verdict["outputs"]:
        for criterion in output.get("criteria", ()):
            say(
                console,
                "",
                f"{output['name']}: {criterion_text(criterion)}",
                style="green" if criterion["passed"] else "red",
            )
    failed = [output for output in verdict["outputs"] if not output["passed"]]
    for output in failed[:_REASONS_SHOWN]:
        say(console, "", f"{output['name']}: {output['reason']}", style="red")
    if len(failed) > _REASONS_SHOWN:
        say(console, "", f"and {len(failed) - _REASONS_SHOWN} more outputs", style="red")
    if not verdict["outputs"] and verdict["reason"]:
        say(console, "", verdict["reason"], style="red")
    if verdict["outcome"] == "PASS" and verdict["reason"]:
        say(console, "note", verdict["reason"])


def _describe_bound(control: Mapping[str, Any]) -> str:
    """Describe the bound that a declared arithmetic set."""
    return (
        f"{control['arithmetic']}, bound: {control['factor']:g} times the deviation of the model computed in "
        f"{control['arithmetic']} ({control['source']})"
    )


def _compute_name_width(console: Console, rows: list[list[str]], gap: int) -> int:
    """Return the terminal width that remains for the first column."""
    return console.width - 2 - sum(max(map(len, column)) + gap for column in list(zip(*rows, strict=True))[1:])


def _format_row(output: dict[str, Any]) -> list[str]:
    """Return an output's row of the table."""
    return [
        output["name"].replace("\n", r"\n"),
        type_text(output["dtype"], output["shape"]),
        "-" if output["mismatches"] is None else f"{output['mismatches']} of {output['elements']}",
        *(format_number(output.get(one.key), one.digits) for one in _SHOWN),
    ]


def _shorten_name(name: str, room: int) -> str:
    """Shorten a wide name in the middle. Reasons and the record contain the complete name."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(name) <= room:
        return name
    tail = room // 4
    return f"{set_cell_size(name, room - 1 - tail)}…{set_cell_size(name[::-1], tail)[::-1]}"


def _describe_tolerance(outputs: Sequence[dict[str, Any]]) -> str:
    """Describe how outputs are judged: by criteria, or by a tolerance if all outputs have the same tolerance."""
    judged = [output for output in outputs if not output.get("criteria")]
    by_criteria = ", by criteria" if len(judged) < len(outputs) else ""
    outputs = judged
    found = {(output["tolerance"] or {}).get(name) for output in outputs for name in ("rtol", "atol")}
    if not found:
        return by_criteria
    if found == {None}:
        return f"{by_criteria}, exact"
    first = outputs[0]["tolerance"]
    if any(output["tolerance"] != first for output in outputs):
        return f"{by_criteria}, tolerance by dtype"
    noise = " with rounding noise" * any(output.get("noise") for output in outputs)
    return f"{by_criteria}, rtol {first['rtol']:g}, atol {first['atol']:g}{noise}"


def _format_device_time(device: dict[str, Any]) -> str:
    count, cold = device["iterations"], device.get("cold_ns")
    shown = {name: seconds(device[f"{name}_ns"] / 1e9) for name in ("p50", "p90", "min", "stdev")}
    if count == 1:
        return f"{shown['min']} (1 {'iteration' if cold is None else 'cold iteration'})"
    times = ", ".join(together(f"{name} {text}") for name, text in shown.items())
    if cold is None:
        return f"{times} {together(f'({count} iterations)')}"
    return f"{times} ({together(f'{count} iterations')}; excludes the cold first iteration: {seconds(cold / 1e9)})"


def _describe_execution(case: dict[str, Any]) -> str:
    artifact, provenance = case["artifact"], case["provenance"]
    if not artifact:
        return ""
    board = provenance.get("board") or (case["error"] or {}).get("board")
    words = (artifact["runtime"], provenance.get("runtime_version"), board and f"on {board}")
    without = ", without an agent" if provenance.get("command") else ""
    return " ".join(word for word in words if word) + without


def _print_error(console: Console, case: dict[str, Any]) -> None:
    error = case["error"]
    say(console, "stage", case["stage"] + (f" on board {error['board']}" if error["board"] else ""))
    lines = error["detail"].strip().splitlines()
    if len(lines) > _DETAIL_SHOWN:
        # Python reports a crash at the start of the output, other programs at the end.
        half = _DETAIL_SHOWN // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} more lines in run.json ...", *lines[-half:]]
    for line in lines:
        say(console, "", line, style="dim", indent=4, whole=True)
    if error["hint"]:
        say(console, "hint", error["hint"], whole=True)


def _escape_markup(text: str) -> str:
    from rich.markup import escape

    return escape(text)


# Stages with cached results take milliseconds. Writing the record of many cases takes as long.
_SOON_S = 0.2


class Recorder:
    """Updates a run's record. Thread-safe.

    Args:
        order: Names of all cases of the run.
        cases: Cases to run now. Existing entries of cases not in this list are unchanged.
    """

    def __init__(self, run: Run, order: Sequence[str], cases: Sequence[Case]) -> None:
        self._run = run
        self._order = list(order)
        self._cases = {case.name: case for case in cases}
        self._records: dict[str, Any] = {}
        # The records as JSON. Encoding hundreds of cases at each change would take most of the time.
        self._texts: dict[str, str] = {}
        self._tensors: dict[str, dict[str, Any]] = {case.name: {} for case in cases}
        self._lock = threading.Lock()
        # Changed cases to write, and the timer that writes them. An earlier write does not cancel the timer: a thread
        # per case takes longer than a timer without work.
        self._news: dict[str, Case] = {}
        self._writer: threading.Timer | None = None
        self.ended: set[str] = set()
        self._is_new = not run.record["cases"]
        for record in run.record["cases"]:
            self._set_record(record)
        self._update_records(cases)

    def add(self, cases: Sequence[Case]) -> None:
        """Add cases after the existing ones."""
        with self._lock:
            self._order += [case.name for case in cases if case.name not in self._order]
            self._cases |= {case.name: case for case in cases}
            self._tensors |= {case.name: {} for case in cases}

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """Outcomes of ended cases, by name."""
        with self._lock:
            found = {name: record["outcome"] for name, record in self._records.items() if record["outcome"]}
        return {name: Outcome(outcome) for name, outcome in found.items()}

    def write(self, case: Case | None = None) -> None:
        """Write the record now, with one changed case or with all cases. Raises StorageError."""
        with self._lock:
            if case is not None:
                self._news[case.name] = self._cases[case.name] = case
            self._save_cases(list(self._cases.values()) if case is None else list(self._news.values()))

    def write_soon(self, case: Case) -> None:
        """Schedule a write for a case without an outcome. The write includes other changes made in the meantime."""
        with self._lock:
            self._news[case.name] = self._cases[case.name] = case
            if self._writer is None:
                self._writer = threading.Timer(_SOON_S, self._write_scheduled)
                self._writer.daemon = True
                self._writer.start()

    def forget(self) -> None:
        """Discard scheduled writes."""
        with self._lock:
            self._news.clear()

    def _write_scheduled(self) -> None:
        with self._lock, contextlib.suppress(StorageError):  # the next write reports the error
            self._writer = None
            if self._news:
                self._save_cases(list(self._news.values()))

    def _save_cases(self, cases: Sequence[Case]) -> None:
        self._news.clear()
        self._update_records(cases)
        self._run.save([self._texts[name] for name in self._order if name in self._texts])

    def keep(self, case: Case, what: str) -> None:
        """Store a case's ``inputs``, ``outputs`` or ``references``."""
        save = self._run.save_tensors
        stored: list[Any]
        if what == "references":
            stored = [save(case.name, f"reference-{number}", one.outputs) for number, one in enumerate(case.references)]
        else:
            held = case.inputs if what == "inputs" else case.result.outputs if case.result else None
            stored = save(case.name, what, held or {})
        self._tensors[case.name][what] = stored
        self.write_soon(case)

    def end(self, case: Case) -> None:
        """Record a case's outcome."""
        self.ended.add(case.name)
        self.write(case)

    def interrupt(self) -> None:
        """Record Ctrl-C: cases that had not ended were stopped and have no outcome."""
        for name, case in self._cases.items():
            if name not in self.ended:
                self._cases[name] = replace(case, outcome=None, error=None, reason="interrupted")
        self._run.record["exit_code"] = EXIT_INTERRUPTED
        self.write()

    def finish(self, exit_code: int | None = None, *, finished: bool = True) -> dict[str, Any]:
        """Set the run's outcome and exit code from its cases, which must have ended.

        Args:
            exit_code: Replaces the exit code derived from the outcomes.

        Returns:
            The record with ``folder``. A new run that never reached a board is deleted, and ``folder`` is "".
        """
        self.forget()
        self._update_records(list(self._cases.values()))
        outcomes = [Outcome(case["outcome"]) for case in self._run.record["cases"]]
        self._run.record["exit_code"] = exit_code_of(outcomes) if exit_code is None else exit_code
        # A skipped case must not determine the run's outcome if another case passed, in any order.
        counted = sorted(outcomes, key=lambda outcome: outcome is Outcome.SKIP)
        self._run.record["outcome"] = max(counted, key=lambda outcome: outcome.exit_code).value
        self._run.record["finished"] = finished
        came_in = self._run.record["board"] or not NEVER_IN.issuperset(outcomes)
        if self._is_new and not came_in:
            self._run.discard()
            return {**self._run.record, "folder": ""}
        self._run.save()
        return {**self._run.record, "folder": str(self._run.folder)}

    def _update_records(self, cases: Sequence[Case]) -> None:
        for case in cases:
            self._set_record(case_record(case, self._tensors[case.name]))
        self._run.record["cases"] = [self._records[name] for name in self._order if name in self._records]

    def _set_record(self, record: dict[str, Any]) -> None:
        self._records[record["name"]] = record
        self._texts[record["name"]] = json.dumps(jsonable(record), allow_nan=False)
