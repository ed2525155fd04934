"""What is left of a bisection: of each program that was wrong, its model, tensors and logs, in a folder."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from hil.controller.analysis.bisect.result import Finding
from hil.controller.pipeline.case import Case
from hil.controller.storage.runs import Run, storing
from hil.core.results import Outcome

_KINDS = ("inputs", "outputs", "references")


def keep_case(folder: Path, case: Case, finding: Finding) -> None:
    """Store a case that did not pass: its model's files, ``inputs/``, ``outputs/`` and ``references/`` as .npy.

    Raises:
        StorageError: the folder cannot be written.
    """
    if finding.outcome in (Outcome.PASS, Outcome.SKIP):
        return
    place = folder / case.name
    with storing(place):
        for name, path in case.model.files.items() if case.model else ():
            target = place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    tensors = (case.inputs, case.result.outputs if case.result else None, case.options.expected)
    for kind, named in zip(_KINDS, tensors, strict=True):
        if isinstance(named, dict):
            Run(folder, {}).save_tensors(case.name, kind, named)


def repeat_command(folder: Path, name: str, board: list[str]) -> str:
    """The command that runs a kept layer again.

    Args:
        folder: where it was kept.
        name: the layer's.
        board: options that name the board and how the model is compiled.
    """
    place = folder / name
    (model,) = place.glob("*.onnx")
    given = [
        part
        for kind, option in (("inputs", "--input"), ("references", "--expected"))
        for path in _numbered(place / kind)
        for part in (option, str(path))
    ]
    return shlex.join(["hil", "run", str(model), *board, *given])


def _numbered(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.npy"), key=lambda path: int(path.name.split("-", 1)[0]))
