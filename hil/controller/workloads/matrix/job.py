"""Matrix runs: a directory with a stored run per target, and a common report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.storage.origin import origin_of_request, typed_command
from hil.controller.storage.outcomes import exit_code_for
from hil.controller.storage.runs import MATRIX, check_seal, discard_folder, seal, storing, write_json
from hil.controller.workloads.matrix.files import write_matrix
from hil.controller.workloads.matrix.report import SCHEMA, MatrixReport, load_matrix
from hil.controller.workloads.matrix.targets import MatrixTarget
from hil.core.bounded_json import read_json
from hil.core.results import Outcome
from hil.core.text import TextSink
from hil.errors import EXIT_INTERRUPTED, HilError, StorageError, UsageError

# Runs a target, or resumes the stored run. Called with the target and its directory.
RunTarget = Callable[[MatrixTarget, Path], object]


class Matrix:
    """A matrix in a directory. ``head`` is the content of matrix.json."""

    def __init__(self, folder: Path, head: dict[str, Any], *, made_root: bool = False) -> None:
        self.folder = folder
        self.head = head
        self._made_root = made_root

    @classmethod
    def create(
        cls,
        folder: Path,
        kind: str,
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
        asked = {"kind": kind, "request": request, "targets": [[one.name, dict(one.options)] for one in targets]}
        made_root = not folder.parent.exists()
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            seal(folder, asked)
        head: dict[str, Any] = {
            "schema": SCHEMA,
            "id": folder.name,
            "kind": kind,
            "title": title,
            "created": time.time(),
            "origin": origin_of_request(request).to_json(),
            "again": typed_command(),
            "request": request,
            "targets": [{"name": one.name, "options": dict(one.options), "error": None} for one in targets],
            "command": command,
            "board": {"name": ", ".join(one.name for one in targets)},
            "cases": [],
            "outcome": None,
            "exit_code": None,
            "finished": False,
        }
        made = cls(folder, head, made_root=made_root)
        made.save()
        return made

    @classmethod
    def open(cls, folder: Path, kind: str) -> Matrix:
        """Open a stored matrix to resume it.

        Raises:
            UsageError: the matrix is missing, has a different kind, or was created by a different user.
        """
        try:
            head = read_json(folder / MATRIX)
            if head["schema"] > SCHEMA:
                raise UsageError(f"{folder} was written by a newer hil (schema {head['schema']})")
            named = [[one["name"], one["options"]] for one in head["targets"]]
            asked = {"kind": head["kind"], "request": head["request"], "targets": named}
            other = head["kind"] != kind
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(f"{folder / MATRIX} cannot be read: {error}") from error
        check_seal(folder, asked)
        if other:
            raise UsageError(f"{folder} is a matrix of a different command", hint=f"resume it with: {head['command']}")
        return cls(folder, head)

    @property
    def targets(self) -> tuple[MatrixTarget, ...]:
        """The targets, in order."""
        return tuple(MatrixTarget(one["name"], one["options"]) for one in self.head["targets"])

    def save(self) -> None:
        """Write matrix.json atomically."""
        write_json(self.folder / MATRIX, self.head)

    def run(self, run_target: RunTarget, *, say: TextSink) -> MatrixReport:
        """Run the targets in order, and write the report after every target.

        If a target cannot run (for example the board is unreachable), the target's column shows the error, and the
        other targets still run.

        Raises:
            HilError: no target could run: the first error. The matrix is deleted.
            StorageError: the directory cannot be written.
            KeyboardInterrupt: Ctrl-C; partial results and reports are stored.
        """
        self.head |= {"finished": False, "exit_code": None, "outcome": None}
        errors: list[HilError] = []
        entries, targets = self.head["targets"], self.targets
        for number, (entry, target) in enumerate(zip(entries, targets, strict=True), 1):
            say(f"target {number} of {len(targets)}: {target.name}")
            entry["error"] = None
            try:
                run_target(target, self.folder / target.name)
            except StorageError:
                raise
            except HilError as error:
                errors.append(error)
                say(f"{target.name}: {error.message}")
                names = ("outcome", "message", "hint", "exit_code")
                entry["error"] = {name: getattr(error, name) or "" for name in names}
            except KeyboardInterrupt:
                self._store_outcome(self._write_report(), EXIT_INTERRUPTED)
                if self.head["command"]:
                    say(f"interrupted; resume with: {self.head['command']}")
                raise
            report = self._write_report()
        if len(errors) == len(targets) and not any(self._is_stored(target) for target in targets):
            discard_folder(self.folder, made_root=self._made_root)
            raise errors[0]
        self.head["finished"] = True
        self._store_outcome(report, report.exit_code)
        return report

    def _is_stored(self, target: MatrixTarget) -> bool:
        folder = self.folder / target.name
        return any((folder / file).exists() for file in ("run.json", "suite.json"))

    def _write_report(self) -> MatrixReport:
        """Store the outcomes of the cases, in run.json's fields, and write the report."""
        self.save()  # load_matrix reads the target's error from it
        report = load_matrix(self.folder)
        self.head["cases"] = [
            {"name": row.id, "outcome": "/".join(cell.word for cell in row.cells)} for row in report.rows
        ]
        self.save()
        write_matrix(report, self.folder)
        return report

    def _store_outcome(self, report: MatrixReport, exit_code: int) -> None:
        """Store the outcome and the exit code."""
        words = [cell.word for row in report.rows for cell in row.cells if cell.record is not None]
        # As for runs, SKIP is the outcome only if all cases were skipped.
        words.sort(key=lambda word: word == Outcome.SKIP)
        self.head |= {"outcome": max(words, key=exit_code_for, default=None), "exit_code": exit_code}
        self.save()
