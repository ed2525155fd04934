"""The terminal: progress of cases and suites, and their results."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hil.controller.storage import prompts
from hil.core.results import BOARD_OUTCOMES, Outcome
from hil.core.text import jsonable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from hil.controller.workloads.suites.record import CaseRecord

# Wider than any line of a table, if no terminal limits it.
_UNLIMITED = 2000

_QUIET = (Outcome.PASS.value, Outcome.XFAIL.value, Outcome.SKIP.value)
_MESSAGE = 200


def console() -> Console:
    """Return the console for tables: as wide as the terminal, or else as wide as they need."""
    from hil.controller.storage.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=_UNLIMITED)


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(json.dumps(jsonable(document), indent=1, allow_nan=False) + "\n")


@contextlib.contextmanager
def shown(bars: Progress) -> Iterator[None]:
    """Show progress bars, paused while the user is asked a question."""

    @contextlib.contextmanager
    def pause() -> Iterator[None]:
        bars.stop()
        try:
            yield
        finally:
            bars.start()

    with bars, prompts.pausing(pause) if not bars.disable else contextlib.nullcontext():
        yield


class Screen:
    """A line with a bar for each case, on stderr. A context manager."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        from hil.controller.storage.console import Console

        self._out = Console()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[stage]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=quiet,
        )
        self._shown = contextlib.ExitStack()
        self._tasks: dict[str, Any] = {}
        self._lock = threading.Lock()

    def begin(self, name: str, stages: int) -> None:
        """Add a case."""
        self._tasks[name] = self._progress.add_task(name, total=stages, stage="")

    def stage(self, name: str, number: int, text: str) -> None:
        """Show the stage of a case."""
        with self._lock:
            if name in self._tasks:
                self._progress.update(self._tasks[name], completed=number, stage=text)

    def end(self, name: str) -> None:
        """Remove a case that has ended."""
        with self._lock:
            if name in self._tasks:
                self._progress.remove_task(self._tasks.pop(name))

    def note(self, text: str) -> None:
        """Print a note above the bars."""
        with prompts.between_questions():
            self._progress.console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def show(self, record: dict[str, Any]) -> None:
        """Print the results of a run's cases."""
        from hil.controller.pipeline.record import print_case

        cases, where = record["cases"], shlex.quote(str(record["folder"]))
        for case in cases:
            print_case(self._out, case, where=where if len(cases) == 1 and record["folder"] else "")
        if len(cases) > 1:
            passed = sum(case["outcome"] == "PASS" for case in cases)
            text = f"{passed} of {len(cases)} passed" + (f", stored in {where}" if record["folder"] else "")
            self._out.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Screen:
        self._shown.enter_context(shown(self._progress))
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()


class SuiteScreen:
    """Progress of a suite on stderr. A context manager."""

    def __init__(self, *, bar: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        from hil.controller.storage.console import Console

        self._console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not bar,
        )
        self._task = self._progress.add_task("reading the models", total=None)
        self._shown = contextlib.ExitStack()
        self._counts: Counter[str] = Counter()
        self._lost: set[str] = set()

    def begin(self, total: int, done: Sequence[CaseRecord]) -> None:
        """Set the number of cases, and those that ended before."""
        self._counts.update(record.outcome for record in done)
        self._progress.update(self._task, total=total, completed=len(done), description=self._counts_text())

    def end(self, record: CaseRecord) -> None:
        """Count a case that has ended, and print it if it failed; of cases that a lost board ends, only the first."""
        self._counts[record.outcome] += 1
        self._progress.update(self._task, advance=1, description=self._counts_text())
        if record.outcome in _QUIET:
            return
        message = record.message.splitlines()[0][:_MESSAGE] if record.message else ""
        if record.outcome in BOARD_OUTCOMES:
            # A lost board ends all the following cases.
            if message in self._lost:
                return
            self._lost.add(message)
        self._print(f"{record.outcome}  {record.id}  {message}".rstrip(), "red")

    def note(self, text: str) -> None:
        """Print a note above the bar."""
        self._print(text, "yellow")

    def _print(self, text: str, style: str) -> None:
        with prompts.between_questions():
            self._progress.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _counts_text(self) -> str:
        return ", ".join(f"{count} {outcome}" for outcome, count in sorted(self._counts.items()))

    def __enter__(self) -> SuiteScreen:
        self._shown.enter_context(shown(self._progress))
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()
