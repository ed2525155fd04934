"""iree-run-module's flag files: one ``--flag=value`` a line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.controller.jobs import Job

# Flags of iree-run-module and iree-benchmark-module that say how, not what: the board config says that here.
_IGNORED = ("device", "print_statistics", "device_allocator", "benchmark_repetitions", "benchmark_min_time", "output")


def read_flagfile(job: Job) -> Job:
    """The job with what its flag file says; what the command line says stands.

    ``--module``, ``--function``, ``--input`` and ``--expected_output`` are taken (files relative to the flag file),
    flags that only say how to run are left to the board's config.

    Raises:
        UsageError: the file is missing, or a flag is none that hil can honour.
    """
    assert job.flagfile is not None
    try:
        lines = job.flagfile.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the flag file {job.flagfile} cannot be read: {error}") from error
    folder = job.flagfile.parent
    modules: list[Path] = []
    inputs: list[str] = []
    expected: list[str] = []
    function = ""
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.lstrip("-").partition("=")
        if not text.startswith("--") or not equals:
            raise UsageError(f"{job.flagfile}:{number}: {text[:60]!r} is not --flag=value")
        if name == "module":
            modules.append(folder / value)
        elif name == "function":
            function = value
        elif name == "input":
            inputs.append(_located(value, folder))
        elif name == "expected_output":
            expected.append(_located(value, folder))
        elif name not in _IGNORED:
            raise UsageError(f"{job.flagfile}:{number}: hil does not know --{name}")
    return replace(
        job,
        models=job.models or tuple(modules),
        function=job.function or function,
        inputs=job.inputs or tuple(inputs),
        expected=job.expected or tuple(expected),
        flagfile=None,
    )


def _located(value: str, folder: Path) -> str:
    """A tensor with its file, if it names one, seen from here."""
    before, at, name = value.partition("@")
    return f"{before}@{folder / name}" if at else value
