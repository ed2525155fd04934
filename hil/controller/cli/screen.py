"""Print the progress of cases and suites, and their results, on the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from hil.controller.storage.screen import prompts
from hil.controller.storage.screen.web_link import VARIABLE, make_web_link
from hil.core.results import BOARD_OUTCOMES, Outcome
from hil.core.text import convert_to_json
from hil.errors import UsageError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from typing_extensions import Self

    from hil.controller.records.base import Record
    from hil.controller.records.run import RunRecord
    from hil.controller.records.suite import CaseRecord
    from hil.controller.storage.screen.console import Console
    from hil.controller.workloads.matrix.report import MatrixReport

_QUIET = (Outcome.PASS.value, Outcome.XFAIL.value, Outcome.SKIP.value)
_MESSAGE = 200


def print_json(document: Any) -> None:
    """Print a JSON document on stdout."""
    sys.stdout.write(json.dumps(convert_to_json(document), indent=1, allow_nan=False) + "\n")


def answer(
    as_json: bool, document: Record | Mapping[str, Any], *lines: str, show: Callable[[], object] | None = None
) -> int:
    """Print the document as JSON, or print the lines that ``show`` returns. Return the document's exit code."""
    if as_json:
        print_json({"schema": 1, **(document if isinstance(document, Mapping) else document.to_json())})
    else:
        if show:
            show()
        for line in lines:
            click.echo(line)
    code = document.get("exit_code") if isinstance(document, Mapping) else getattr(document, "exit_code", 0)
    return int(code or 0)  # unfinished runs have no exit code


def print_message(text: str) -> None:
    """Print a message to stderr."""
    click.echo(text, err=True)


def print_web_link(folder: str | Path | None) -> None:
    """Print the link of stored results in `hil web` to stderr, if HIL_WEB_URL is set."""
    if folder and os.environ.get(VARIABLE):
        link = make_web_link(Path(folder))
        print_message(f"open {link}" if link else f"hil: no link: {VARIABLE} is not an http URL")


def confirm(question: str, *, yes: bool) -> None:
    """Ask a question on the terminal, unless ``yes``.

    Raises:
        click.Abort: the answer is not yes.
        UsageError: there is no terminal.
    """
    if yes:
        return
    if not prompts.can_ask():
        raise UsageError(f"no terminal for the question: {question}", hint="use --yes to confirm")
    if prompts.ask(f"{question} [y/N] ", echo=True).lower() not in ("y", "yes"):
        raise click.Abort


def print_cases(record: RunRecord) -> None:
    """Print the results of a run's cases."""
    from hil.controller.pipeline.records.print_case import print_case
    from hil.controller.storage.screen.console import Console

    out, cases, where = Console(), record.cases, shlex.quote(record.folder) if record.folder else ""
    for case in cases:
        print_case(out, case, where=where if len(cases) == 1 else "")
    if len(cases) > 1:
        passed = sum(case.outcome is Outcome.PASS for case in cases)
        text = f"{passed} of {len(cases)} passed" + (f", stored in {where}" if where else "")
        out.print(text, highlight=False, markup=False, soft_wrap=True)


def answer_matrix(as_json: bool, folder: Path | None, report: MatrixReport) -> int:
    """Print a matrix. Return the most severe exit code among the targets."""
    from hil.controller.storage.screen.console import make_table_console
    from hil.controller.workloads.matrix.files import print_matrix

    return answer(
        as_json, report.to_document(folder), show=lambda: print_matrix(make_table_console(), report, where=folder)
    )


class Bars:
    """Progress bars on stderr, if stderr is a terminal. Context manager.

    Args:
        quiet: never show bars, for ``--json``.
        columns: names of columns in :mod:`rich.progress`, or text templates, from left to right.
    """

    def __init__(self, quiet: bool, columns: Sequence[str], width: int) -> None:
        self._progress = _make_progress(columns, width) if sys.stderr.isatty() and not quiet else None
        self._shown = contextlib.ExitStack()

    @property
    def are_shown(self) -> bool:
        """True if bars are shown."""
        return self._progress is not None

    def note(self, text: str, style: str = "yellow") -> None:
        """Print a note above the bars."""
        with prompts.block_prompts():
            console = self._progress.console if self._progress else _make_console()
            console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def interrupt(self, command: str) -> None:
        """Print the command that resumes the work."""
        self.note(f"interrupted; resume with: {command}")

    def add(self, description: str, total: float | None, **fields: Any) -> TaskID:
        """Add a bar and return the ID."""
        return self._progress.add_task(description, total=total, **fields) if self._progress else cast("TaskID", 0)

    def update(self, bar: TaskID, **values: Any) -> None:
        """Update a bar with arguments of :meth:`rich.progress.Progress.update`."""
        if self._progress:
            self._progress.update(bar, **values)

    def remove(self, bar: TaskID) -> None:
        """Remove a bar."""
        if self._progress:
            self._progress.remove_task(bar)

    @contextlib.contextmanager
    def _pause_bars(self) -> Iterator[None]:
        """Hide the bars while hil asks the user a question."""
        assert self._progress is not None
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()

    def __enter__(self) -> Self:
        if self._progress:
            self._shown.enter_context(self._progress)
            self._shown.enter_context(prompts.pause_during_prompts(self._pause_bars))
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()


def _make_progress(columns: Sequence[str], width: int) -> Progress:
    from rich import progress

    made: dict[str, Callable[[], progress.ProgressColumn]] = {
        "spinner": progress.SpinnerColumn,
        "bar": lambda: progress.BarColumn(bar_width=width),
        "count": progress.MofNCompleteColumn,
        "time": progress.TimeElapsedColumn,
    }
    shown = (made[name]() if name in made else progress.TextColumn(name, markup=False) for name in columns)
    return progress.Progress(*shown, console=_make_console(), transient=True)


def _make_console() -> Console:
    """Return a console on stderr. Import rich only here, because it is slow to import."""
    from hil.controller.storage.screen.console import Console

    return Console(stderr=True)


class Screen(Bars):
    """Progress with a line and a bar per case."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet, ("spinner", "{task.description}", "bar", "{task.fields[stage]}", "time"), 24)
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def begin(self, name: str, stages: int) -> None:
        """Add a case."""
        self._tasks[name] = self.add(name, stages, stage="")

    def stage(self, name: str, number: int, text: str) -> None:
        """Show the stage of a case."""
        with self._lock:
            if name in self._tasks:
                self.update(self._tasks[name], completed=number, stage=text)

    def end(self, name: str, outcome: str = "", reason: str = "") -> None:
        """Remove a case that has ended."""
        with self._lock:
            if name in self._tasks:
                self.remove(self._tasks.pop(name))


class SuiteScreen(Bars):
    """Progress of a suite."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet, ("spinner", "bar", "count", "{task.description}", "time"), 32)
        self._task = self.add("reading the models", None)
        self._counts: Counter[str] = Counter()
        self._lost: set[str] = set()

    def begin(self, total: int, done: Sequence[CaseRecord]) -> None:
        """Set the number of cases, and the cases that an earlier part has finished.

        A matrix calls this for every target.
        """
        self._counts = Counter(record.outcome for record in done)
        self.update(self._task, total=total, completed=len(done), description=self._format_counts())

    def end(self, record: CaseRecord) -> None:
        """Count a finished case. Print it if it failed; if multiple cases lost the same board, print only the first."""
        self._counts[record.outcome] += 1
        self.update(self._task, advance=1, description=self._format_counts())
        if record.outcome in _QUIET:
            return
        message = record.message.splitlines()[0][:_MESSAGE] if record.message else ""
        if record.outcome in BOARD_OUTCOMES:
            # A lost board ends all following cases with the same message.
            if message in self._lost:
                return
            self._lost.add(message)
        self.note(f"{record.outcome}  {record.id}  {message}".rstrip(), "red")

    def _format_counts(self) -> str:
        return ", ".join(f"{count} {outcome}" for outcome, count in sorted(self._counts.items()))
