"""The forms of others that a bundle comes from and goes to, by name: what ``--from`` and ``--to`` say.

A package adds one by the entry point group ``hil.bundle_formats``, whose value is a :class:`Format`.
"""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hil.bundles import Bundle
from hil.controller.storage.packages import pick, registered
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.bundles import bpte, case_files, flagfile, onnx
from hil.core.guarded import guard, shown
from hil.errors import ImportFailed, StageError, UsageError


class Read(Protocol):
    """Makes a bundle of what another tool wrote."""

    def __call__(self, path: Path, *, context: RunContext) -> Bundle:
        """Read a file or a folder.

        What is untrusted or heavy is parsed through ``context.isolated.call(function, {...})``. A bundle is made
        by :meth:`hil.bundles.Bundle.create`, which checks every case against the signature; it keeps the program's
        files mapped, so a temporary folder that they lie in may go afterwards. Every case there is becomes a case; what
        cannot become one is told in ``made[left_out]``, a line for each.

        Args:
            path: what the user named; nobody has looked at it yet.

        Raises:
            UsageError: it is not there, not of this form, or its cases do not fit its program; the message names the
                method, the case and the tensor.
        """


class Write(Protocol):
    """Writes a bundle as another tool reads it."""

    def __call__(self, bundle: Bundle, path: Path, *, context: RunContext) -> None:
        """Write a file or a folder.

        Args:
            bundle: as it was opened; its tensors are views of the file.
            path: where to; nothing is there yet, and its parent folder exists.

        Raises:
            UsageError: the form has no room for what the bundle holds (a runtime, a dtype, several methods): say which.
        """


@dataclass(frozen=True)
class Format:
    """A form of another tool's."""

    # read, write: a :class:`Read` and a :class:`Write`, or their ``module:function``.
    read: Read | str
    write: Write | str
    is_folder: bool
    summary: str


_GROUP, _KIND = "hil.bundle_formats", "bundle format"
_IREE = "a folder of a .vmfb, .npy files and a flagfile a case, as iree-run-module takes them"
_BUILT_IN = {
    "onnx": Format(
        onnx.read_onnx, onnx.write_onnx, True, "a folder of model.onnx and ONNX's own test_data_set_* folders"
    ),
    "flagfile": Format(flagfile.read_flagfiles, flagfile.write_flagfiles, True, _IREE),
    "golden": Format(
        case_files.read_golden,
        case_files.write_golden,
        True,
        "a folder of the program, the cases' tensors as .npy, and golden.json",
    ),
    "bpte": Format(bpte.read_bpte, bpte.write_bpte, False, "ExecuTorch's bundled program, a .bpte file"),
}


def formats() -> dict[str, Format]:
    """Every form by name: the built-in ones and those of the entry point group ``hil.bundle_formats``."""
    return registered(_GROUP, _BUILT_IN, Format)


def read_format(name: str, path: Path, *, context: RunContext) -> Bundle:
    """Read a bundle from another tool's form.

    Raises:
        UsageError: there is no such form, or as :class:`Read` says.
        ImportFailed: a package's code for the form failed.
    """
    function = pick(_KIND, formats(), name).read
    with guard(_KIND, _GROUP, name, ImportFailed, StageError, UsageError):
        found = _call(function, path, context=context)
        if not isinstance(found, Bundle):
            raise TypeError(f"it returned {shown(found)}: expected a hil.bundles.Bundle")
    return found


def write_format(name: str, bundle: Bundle, path: Path, *, context: RunContext) -> None:
    """Write a bundle in another tool's form.

    Raises:
        UsageError: there is no such form, or as :class:`Write` says.
        StageError: a package's code for the form failed.
    """
    function = pick(_KIND, formats(), name).write
    with guard(_KIND, _GROUP, name, StageError, StageError, UsageError):
        _call(function, bundle, path, context=context)


def _call(function: Any, *given: Any, context: RunContext) -> Any:
    called = pkgutil.resolve_name(function) if isinstance(function, str) else function
    # Packages that were written before call it so.
    name = "shop" if "shop" in inspect.signature(called).parameters else "context"
    return called(*given, **{name: context})
