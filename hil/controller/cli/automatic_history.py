"""Steps after a command has stored results: add them to the history, and print their link in `hil web`."""

from __future__ import annotations

from pathlib import Path

from hil.controller.cli.screen import print_message, print_web_link


def add_to_history(folder: str | Path | None) -> None:
    """Add a run, bench, suite run or matrix: see :func:`hil.controller.workloads.history.automatic.add_results`.

    Then print the link of the results: see :func:`hil.controller.cli.screen.print_web_link`.

    Args:
        folder: directory of the results; "" or None if they were discarded.
    """
    from hil.controller.pipeline.settings.project import find_project

    if folder and find_project(Path()) is not None:
        from hil.controller.workloads.history.automatic import add_results

        add_results([Path(folder)], lambda text: print_message(f"hil: {text}"))
    print_web_link(folder)
