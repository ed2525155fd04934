"""The terminal while a suite runs: a bar with counts, and each case that did not pass as it ends."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

from hil.controller.cli.screen import shown
from hil.controller.storage import prompts
from hil.controller.workloads.suites.record import CaseRecord
from hil.core.results import BOARD_OUTCOMES, Outcome

_QUIET = (Outcome.PASS.value, Outcome.XFAIL.value, Outcome.SKIP.value)
_MESSAGE = 200


class SuiteScreen:
    """Tells on stderr how a suite goes on. A context manager.

    Args:
        bar: also show a bar: stderr is a terminal.
    """

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
        """The suite's cases are known."""
        self._counts.update(record.outcome for record in done)
        self._progress.update(self._task, total=total, completed=len(done), description=self._words())

    def end(self, record: CaseRecord) -> None:
        """A case is over; one that is not as it should be is told at once, of those lost for one reason the first."""
        self._counts[record.outcome] += 1
        self._progress.update(self._task, advance=1, description=self._words())
        if record.outcome in _QUIET:
            return
        message = record.message.splitlines()[0][:_MESSAGE] if record.message else ""
        if record.outcome in BOARD_OUTCOMES:
            # A board that is gone ends every case that was to come.
            if message in self._lost:
                return
            self._lost.add(message)
        self._say(f"{record.outcome}  {record.id}  {message}".rstrip(), "red")

    def note(self, text: str) -> None:
        """Say something now, above the bar."""
        self._say(text, "yellow")

    def _say(self, text: str, style: str) -> None:
        with prompts.between_questions():
            self._progress.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _words(self) -> str:
        return ", ".join(f"{count} {outcome}" for outcome, count in sorted(self._counts.items()))

    def __enter__(self) -> SuiteScreen:
        self._shown.enter_context(shown(self._progress))
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()
