"""Add the results of a command to the history, if the project file enables this."""

from __future__ import annotations

from pathlib import Path

from hil.controller.cli.screen import say
from hil.errors import HilError


def add_to_history(folder: str | Path | None) -> None:
    """Add a run, bench, suite run or matrix to the history if hil.toml has ``auto = true`` in ``[history]``.

    Errors are only reported, because the results are already stored. `hil history add` can add them later.

    Args:
        folder: directory of the results; "" or None if they were discarded.
    """
    from hil.controller.pipeline.settings.project import find_history, find_project

    if not folder or find_project(Path()) is None:
        return
    settings = find_history(Path())
    if not settings.auto:
        return
    from hil.controller.storage.history.store import HistoryStore
    from hil.controller.workloads.history.collect import Collector
    from hil.controller.workloads.history.source_state import SourceOptions

    try:
        collector = Collector(SourceOptions())
        collector.collect(Path(folder))
        found = collector.found
        with HistoryStore.open(settings.place, create=True, quota=settings.quota, baseline=settings.baseline) as store:
            report = store.add(found.entries, found.programs.values())
    except HilError as error:
        say(f"hil: not added to the history: {error}")
    else:
        say(f"hil: added to the history {settings.place}: {report.added} of {len(found.entries)} cases")
