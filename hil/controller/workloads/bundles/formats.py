"""Formats for the import and export of bundles, by name (``--from`` and ``--to``).

Packages add formats by the entry point group ``hil.bundle_formats``, with a :class:`Format` as value.
"""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hil.bundles import Bundle
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.sources.packages import load_registered, pick
from hil.controller.workloads.bundles import bpte, case_files, flagfile, onnx
from hil.core.guarded import format_value, guard
from hil.errors import ImportFailed, StageError, UsageError


class Read(Protocol):
    """Reads a bundle that a different tool wrote."""

    def __call__(self, path: Path, *, context: RunContext) -> Bundle:
        """Read a file or a directory.

        Parse untrusted or large data through ``context.isolated.call(function, {...})``. Create the bundle with
        :meth:`hil.bundles.Bundle.create`, which checks all cases against the signature. The bundle reads the program's
        files, so a temporary directory may be deleted afterwards. Convert all cases. Report cases that cannot be
        converted in ``made[left_out]``, one line per case.

        Args:
            path: the user's path, which is not yet checked.

        Raises:
            UsageError: the path does not exist or has a different format, or cases do not fit the program. The message
                names the method, the case and the tensor.
        """


class Write(Protocol):
    """Writes a bundle for a different tool."""

    def __call__(self, bundle: Bundle, path: Path, *, context: RunContext) -> None:
        """Write a file or a directory.

        Args:
            bundle: the opened bundle. The tensors are views of the file.
            path: the target. The target does not exist yet, but the parent directory exists.

        Raises:
            UsageError: the format does not support a part of the bundle (a runtime, a dtype, multiple methods). The
                message names the unsupported part.
        """


@dataclass(frozen=True)
class Format:
    """A bundle format of a different tool."""

    # read, write: a :class:`Read` and a :class:`Write`, or their ``module:function``.
    read: Read | str
    write: Write | str
    is_folder: bool
    summary: str


_GROUP, _KIND = "hil.bundle_formats", "bundle format"
_IREE = "directory with a .vmfb, .npy files and a flag file per case, for iree-run-module"
_BUILT_IN = {
    "onnx": Format(
        onnx.read_onnx, onnx.write_onnx, True, "directory with model.onnx and ONNX test_data_set_* directories"
    ),
    "flagfile": Format(flagfile.read_flagfiles, flagfile.write_flagfiles, True, _IREE),
    "golden": Format(
        case_files.read_golden,
        case_files.write_golden,
        True,
        "directory with the program, the cases' tensors as .npy, and golden.json",
    ),
    "bpte": Format(bpte.read_bpte, bpte.write_bpte, False, "ExecuTorch bundled program, a .bpte file"),
}


def load_formats() -> dict[str, Format]:
    """Return all formats by name: built-in formats and the entry point group ``hil.bundle_formats``."""
    return load_registered(_GROUP, _BUILT_IN, Format)


def read_format(name: str, path: Path, *, context: RunContext) -> Bundle:
    """Read a bundle from another tool's format.

    Raises:
        UsageError: the format is unknown, or as for :class:`Read`.
        ImportFailed: a package's code for the format failed.
    """
    function = pick(_KIND, load_formats(), name).read
    with guard(_KIND, _GROUP, name, ImportFailed, StageError, UsageError):
        found = _call(function, path, context=context)
        if not isinstance(found, Bundle):
            raise TypeError(f"it returned {format_value(found)}: expected a hil.bundles.Bundle")
    return found


def write_format(name: str, bundle: Bundle, path: Path, *, context: RunContext) -> None:
    """Write a bundle in another tool's format.

    Raises:
        UsageError: the format is unknown, or as for :class:`Write`.
        StageError: a package's code for the format failed.
    """
    function = pick(_KIND, load_formats(), name).write
    with guard(_KIND, _GROUP, name, StageError, StageError, UsageError):
        _call(function, bundle, path, context=context)


def _call(function: Any, *given: Any, context: RunContext) -> Any:
    called = pkgutil.resolve_name(function) if isinstance(function, str) else function
    # Older packages use this parameter name.
    name = "shop" if "shop" in inspect.signature(called).parameters else "context"
    return called(*given, **{name: context})
