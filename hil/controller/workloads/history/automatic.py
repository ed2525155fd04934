"""Add the results of a workload to the history, if the project file enables this."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hil.controller.pipeline.settings.project import find_history
from hil.controller.storage.history.store import HistoryStore
from hil.controller.workloads.history.collect import Collector
from hil.controller.workloads.history.source_state import SourceOptions
from hil.core.text import TextSink
from hil.errors import HilError


def add_results(folders: Sequence[Path], say: TextSink, *, start: Path = Path()) -> None:
    """Add runs, benches, suite runs or matrices to the history if hil.toml has ``auto = true`` in ``[history]``.

    Errors are only reported, because the results are already stored. `hil history add` can add them later.

    Args:
        folders: directories of the results.
        start: directory from which the project file is searched.
    """
    try:
        settings = find_history(start)
        if not settings.auto:
            return
        collector = Collector(SourceOptions())
        for folder in folders:
            collector.collect(folder)
        found = collector.found
        with HistoryStore.open(settings.place, create=True, quota=settings.quota, baseline=settings.baseline) as store:
            report = store.add(found.entries, found.programs.values())
    except HilError as error:
        say(f"not added to the history: {error}")
    else:
        say(f"added to the history {settings.place}: {report.added} of {len(found.entries)} cases")
