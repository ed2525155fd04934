"""Matrix runs: a directory with a stored run per target, and a common report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.records.base import read_record
from hil.controller.records.matrix import MatrixBoards, MatrixCase, MatrixKind, MatrixRun, StoredTarget, TargetError
from hil.controller.storage.outcomes import exit_code_for
from hil.controller.storage.runs import (
    MATRIX,
    RECORD,
    check_seal,
    convert_write_errors,
    discard_folder,
    seal,
    write_json,
)
from hil.controller.storage.sources.origin import find_request_origin, get_typed_command
from hil.controller.workloads.matrix.files import write_matrix
from hil.controller.workloads.matrix.report import MatrixReport, load_matrix
from hil.controller.workloads.matrix.targets import MatrixTarget
from hil.controller.workloads.suites.store import HEAD as SUITE_HEAD
from hil.core.results import Outcome
from hil.core.text import TextSink
from hil.errors import EXIT_INTERRUPTED, HilError, StorageError, UsageError

# Runs a target, or resumes the stored run. Called with the target and its directory.
RunTarget = Callable[[MatrixTarget, Path], object]


class Matrix:
    """A matrix in a directory. ``head`` is the content of matrix.json; :meth:`save` writes it."""

    def __init__(self, folder: Path, head: MatrixRun, *, made_root: bool = False) -> None:
        self.folder = folder
        self.head = head
        self._made_root = made_root

    @classmethod
    def create(
        cls,
        folder: Path,
        kind: MatrixKind,
        title: str,
        request: Mapping[str, Any],
        targets: Sequence[MatrixTarget],
        command: str,
    ) -> Matrix:
        """Create a matrix.

        Args:
            kind: the kind of run: ``run``, ``bundle``, ``suite``, ``trace``.
            request: the request as JSON. A target's options override the fields with the same names.
            command: the command that resumes the matrix; "" if no command can resume the matrix.

        Raises:
            UsageError: the directory is not empty.
            StorageError: the directory cannot be written.
        """
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(
                f"{folder} is not empty", hint="choose a different --out, or resume the matrix with --resume"
            )
        head = MatrixRun(
            schema=1,
            id=folder.name,
            kind=kind,
            title=title,
            created=time.time(),
            origin=find_request_origin(request),
            again=get_typed_command(),
            request=dict(request),
            targets=[StoredTarget(name=one.name, options=dict(one.options)) for one in targets],
            command=command,
            board=MatrixBoards(name=", ".join(one.name for one in targets)),
            cases=[],
            outcome=None,
            exit_code=None,
            finished=False,
        )
        made_root = not folder.parent.exists()
        with convert_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            seal(folder, _list_sealed(head))
        made = cls(folder, head, made_root=made_root)
        made.save()
        return made

    @classmethod
    def open(cls, folder: Path, kind: MatrixKind) -> Matrix:
        """Open a stored matrix to resume it.

        Raises:
            UsageError: the matrix is missing, has a different kind, or was created by a different user.
        """
        head = read_record(folder / MATRIX, MatrixRun)
        check_seal(folder, _list_sealed(head))
        if head.kind != kind:
            raise UsageError(
                f"{folder} contains the matrix of a different command", hint=f"resume it with: {head.command}"
            )
        return cls(folder, head)

    @property
    def targets(self) -> tuple[MatrixTarget, ...]:
        """The targets, in order."""
        return tuple(MatrixTarget(one.name, one.options) for one in self.head.targets)

    def save(self, **changes: Any) -> None:
        """Change fields of the head, and write matrix.json atomically."""
        self.head = self.head.replace(**changes)
        write_json(self.folder / MATRIX, self.head.to_json())

    def run(self, run_target: RunTarget, *, say: TextSink) -> MatrixReport:
        """Run the targets in order, and write the report after every target.

        If a target cannot run (for example the board is unreachable), the target's column shows the error, and the
        other targets still run.

        Raises:
            HilError: no target could run. The error is the first target's, and the matrix is deleted.
            StorageError: the directory cannot be written.
            KeyboardInterrupt: Ctrl-C; partial results and reports are stored.
        """
        self.head = self.head.replace(finished=False, exit_code=None, outcome=None)
        errors: list[HilError] = []
        entries, targets = self.head.targets, self.targets
        for number, (entry, target) in enumerate(zip(entries, targets, strict=True), 1):
            say(f"target {number} of {len(targets)}: {target.name}")
            entry.error = None
            try:
                run_target(target, self.folder / target.name)
            except StorageError:
                raise
            except HilError as error:
                errors.append(error)
                say(f"{target.name}: {error.message}")
                entry.error = TargetError(
                    outcome=error.outcome or "", message=error.message, hint=error.hint, exit_code=error.exit_code
                )
            except KeyboardInterrupt:
                self._store_outcome(self._write_report(), EXIT_INTERRUPTED)
                if self.head.command:
                    say(f"interrupted; resume with: {self.head.command}")
                raise
            report = self._write_report()
        if len(errors) == len(targets) and not any(self._is_stored(target) for target in targets):
            discard_folder(self.folder, made_root=self._made_root)
            raise errors[0]
        self.head.finished = True
        self._store_outcome(report, report.exit_code)
        return report

    def _is_stored(self, target: MatrixTarget) -> bool:
        folder = self.folder / target.name
        return any((folder / file).exists() for file in (RECORD, SUITE_HEAD))

    def _write_report(self) -> MatrixReport:
        """Store the outcomes of the cases, in run.json's fields, and write the report."""
        self.save()  # load_matrix reads the target's error from the saved file
        report = load_matrix(self.folder)
        self.save(
            cases=[MatrixCase(name=row.id, outcome="/".join(cell.word for cell in row.cells)) for row in report.rows]
        )
        write_matrix(report, self.folder)
        return report

    def _store_outcome(self, report: MatrixReport, exit_code: int) -> None:
        """Store the outcome and the exit code."""
        words = [cell.word for row in report.rows for cell in row.cells if cell.record is not None]
        # As in runs, the outcome is SKIP only if all cases were skipped.
        words.sort(key=lambda word: word == Outcome.SKIP)
        self.save(outcome=max(words, key=exit_code_for, default=None), exit_code=exit_code)


def _list_sealed(head: MatrixRun) -> dict[str, Any]:
    """Return the fields that no other user may change before the matrix is resumed."""
    targets = [[one.name, one.options] for one in head.targets]
    return {"kind": head.kind, "request": head.request, "targets": targets}
