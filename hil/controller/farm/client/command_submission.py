"""Build the job of `hil farm submit -- CMD...`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hil.controller.farm.client.submitting import Workload
from hil.controller.farm.command_options import check_command, check_patterns
from hil.controller.farm.job_files import JobFiles
from hil.controller.farm.messages import JobSpec, Kind
from hil.errors import UsageError

_MAX_TITLE = 60


def load_command(words: Sequence[str], sent: Sequence[Path], keep: Sequence[str]) -> Workload:
    """Return the job of a command.

    Args:
        sent: files to copy to the command's directory.
        keep: patterns of the files to store after the end.

    Raises UsageError for an invalid command, file or pattern.
    """
    options: dict[str, Any] = {"command": check_command(words), "keep": check_patterns(keep)}
    if programs := [file.name for file in sent if os.access(file, os.X_OK)]:
        options["executable"] = programs
    parcel = JobFiles()
    for file in sent:
        if file.name in parcel.files:
            raise UsageError(f"several files are named {file.name}", hint="rename one of the files")
        parcel.add(file, file.name)
    title = shlex.join(words)
    title = title if len(title) <= _MAX_TITLE else f"{title[: _MAX_TITLE - 3]}..."
    printable = "".join(one if one.isprintable() else " " for one in title)
    spec = JobSpec(Kind.COMMAND, options, parcel.digest_files(), title=printable)
    return Workload(printable, (spec,), parcel.list_uploads())
