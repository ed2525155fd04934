"""Add the results of a command to the history, if the project file enables this."""

from __future__ import annotations

from pathlib import Path

from hil.controller.cli.screen import print_message


def add_to_history(folder: str | Path | None) -> None:
    """Add a run, bench, suite run or matrix: see :func:`hil.controller.workloads.history.automatic.add_results`.

    Args:
        folder: directory of the results; "" or None if they were discarded.
    """
    from hil.controller.pipeline.settings.project import find_project

    if folder and find_project(Path()) is not None:
        from hil.controller.workloads.history.automatic import add_results

        add_results([Path(folder)], lambda text: print_message(f"hil: {text}"))
