"""The terminal: progress of cases and suites, and their results."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.storage import prompts
from hil.core.results import BOARD_OUTCOMES, Outcome
from hil.core.text import jsonable

if TYPE_CHECKING:
    from typing_extensions import Self

    from hil.controller.workloads.matrix.report import MatrixReport
    from hil.controller.workloads.suites.store import CaseRecord

_QUIET = (Outcome.PASS.value, Outcome.XFAIL.value, Outcome.SKIP.value)
_MESSAGE = 200


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(json.dumps(jsonable(document), indent=1, allow_nan=False) + "\n")


def answer(as_json: bool, document: Mapping[str, Any], *lines: str, show: Callable[[], object] | None = None) -> int:
    """Print a verb's result (its document, or what ``show`` prints, and the lines); the exit code is the document's."""
    if as_json:
        print_json({"schema": 1, **document})
    else:
        if show:
            show()
        for line in lines:
            click.echo(line)
    return int(document.get("exit_code") or 0)  # of a run that has not ended there is none


def say(text: str) -> None:
    """Print on stderr what goes on."""
    click.echo(text, err=True)


def print_cases(record: Mapping[str, Any]) -> None:
    """Print the results of a run's cases."""
    from hil.controller.pipeline.record import print_case
    from hil.controller.storage.console import Console

    out, cases, where = Console(), record["cases"], shlex.quote(str(record["folder"]))
    for case in cases:
        print_case(out, case, where=where if len(cases) == 1 and record["folder"] else "")
    if len(cases) > 1:
        passed = sum(case["outcome"] == "PASS" for case in cases)
        text = f"{passed} of {len(cases)} passed" + (f", stored in {where}" if record["folder"] else "")
        out.print(text, highlight=False, markup=False, soft_wrap=True)


def answer_matrix(as_json: bool, folder: Path | None, report: MatrixReport) -> int:
    """Print a matrix; the exit code is the gravest of its targets'."""
    from hil.controller.storage.console import table_console
    from hil.controller.workloads.matrix.files import print_matrix

    document = {"folder": str(folder or ""), **report.to_json()}
    return answer(as_json, document, show=lambda: print_matrix(table_console(), report, where=folder))


class Bars:
    """Progress bars on stderr, if that is a terminal. A context manager.

    Args:
        quiet: show no bars even there, for ``--json``.
        columns: names of the columns in :mod:`rich.progress`, or templates of texts, from left to right.
    """

    def __init__(self, quiet: bool, columns: Sequence[str], width: int) -> None:
        from rich import progress

        from hil.controller.storage.console import Console

        made: dict[str, Callable[[], progress.ProgressColumn]] = {
            "spinner": progress.SpinnerColumn,
            "bar": lambda: progress.BarColumn(bar_width=width),
            "count": progress.MofNCompleteColumn,
            "time": progress.TimeElapsedColumn,
        }
        self.are_shown = sys.stderr.isatty() and not quiet
        self.progress = progress.Progress(
            *(made[name]() if name in made else progress.TextColumn(name) for name in columns),
            console=Console(stderr=True),
            transient=True,
            disable=not self.are_shown,
        )
        self._shown = contextlib.ExitStack()

    def note(self, text: str, style: str = "yellow") -> None:
        """Print a note above the bars."""
        with prompts.between_questions():
            self.progress.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Hide the bars while the user is asked a question."""
        self.progress.stop()
        try:
            yield
        finally:
            self.progress.start()

    def __enter__(self) -> Self:
        self._shown.enter_context(self.progress)
        if self.are_shown:
            self._shown.enter_context(prompts.pausing(self._paused))
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()


class Screen(Bars):
    """A line with a bar for each case."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet, ("spinner", "{task.description}", "bar", "{task.fields[stage]}", "time"), 24)
        self._tasks: dict[str, Any] = {}
        self._lock = threading.Lock()

    def begin(self, name: str, stages: int) -> None:
        """Add a case."""
        self._tasks[name] = self.progress.add_task(name, total=stages, stage="")

    def stage(self, name: str, number: int, text: str) -> None:
        """Show the stage of a case."""
        with self._lock:
            if name in self._tasks:
                self.progress.update(self._tasks[name], completed=number, stage=text)

    def end(self, name: str) -> None:
        """Remove a case that has ended."""
        with self._lock:
            if name in self._tasks:
                self.progress.remove_task(self._tasks.pop(name))


class SuiteScreen(Bars):
    """Progress of a suite."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet, ("spinner", "bar", "count", "{task.description}", "time"), 32)
        self._task = self.progress.add_task("reading the models", total=None)
        self._counts: Counter[str] = Counter()
        self._lost: set[str] = set()

    def begin(self, total: int, done: Sequence[CaseRecord]) -> None:
        """Set the number of cases, and those that ended before. A matrix begins a suite for each target."""
        self._counts = Counter(record.outcome for record in done)
        self.progress.update(self._task, total=total, completed=len(done), description=self._counts_text())

    def end(self, record: CaseRecord) -> None:
        """Count a case that has ended, and print it if it failed; of cases that a lost board ends, only the first."""
        self._counts[record.outcome] += 1
        self.progress.update(self._task, advance=1, description=self._counts_text())
        if record.outcome in _QUIET:
            return
        message = record.message.splitlines()[0][:_MESSAGE] if record.message else ""
        if record.outcome in BOARD_OUTCOMES:
            # A lost board ends all the following cases.
            if message in self._lost:
                return
            self._lost.add(message)
        self.note(f"{record.outcome}  {record.id}  {message}".rstrip(), "red")

    def _counts_text(self) -> str:
        return ", ".join(f"{count} {outcome}" for outcome, count in sorted(self._counts.items()))
