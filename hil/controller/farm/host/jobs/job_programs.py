"""Copy the programs of a job to the directory of its run, for the farm's history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hil.controller.farm.job_files import PROGRAMS
from hil.controller.storage.history.programs import ProgramFolder
from hil.controller.workloads.history.collect import Collector
from hil.controller.workloads.history.source_state import SourceOptions
from hil.errors import HilError


def copy_programs(folder: Path, note: Callable[[str], None]) -> None:
    """Copy the programs of a run or suite run from this host's cache. An error never changes the job's result.

    Args:
        folder: directory of the run.
        note: function to report an error.
    """
    try:
        collector = Collector(SourceOptions())
        collector.collect(folder)
        programs = ProgramFolder(folder / PROGRAMS)
        for digest, source in collector.found.programs.items():
            with programs.copy_program(source) as copy:
                if copy is not None:
                    programs.publish(digest, copy)
    except HilError as error:
        note(f"programs not stored in the farm's history: {error.message}")
