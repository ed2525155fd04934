"""Records of a study: a row per experiment and compiler, and the JSON document of all rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.controller.storage.paths import is_file
from hil.core.config_files import parse_toml
from hil.core.field_types import check_fields
from hil.core.files import read_text
from hil.core.results import BOARD_OUTCOMES, Outcome, Relation, exit_code_of
from hil.errors import EXIT_INTERRUPTED, UsageError, did_you_mean

LIST = "study.toml"
MODEL = "model.py"


@dataclass(frozen=True)
class Experiment:
    """An experiment of a study."""

    name: str
    title: str
    reported: str  # result in an older report; "" if none
    path: Path  # model.py with a function ``training(random)``; see docs/tfcompile.md


@dataclass(frozen=True)
class Asked:
    """Settings of a study."""

    experiments: Sequence[Experiment]
    toolchains: Sequence[str]  # compilers: keys in :data:`hil.controller.workloads.study.toolchains.TOOLCHAINS`
    steps: int
    seed: int  # for initial values and data
    # rtol, atol: tolerance for losses and variables against TensorFlow after each step. With ``atol`` None it is
    # derived from the tensor's scale and noise, as in other workloads.
    rtol: float
    atol: float | None
    allow_blind: tuple[str, ...]  # name patterns for tensors that may pass although they cannot be judged
    accept: tuple[str, ...]  # criteria that replace the tolerance
    no_fallback: bool  # whether a node on an unrequested device fails a row
    timeout: float  # seconds for the load, and for every step
    out: Path
    resume: bool  # whether to keep existing rows in the directory
    labels: tuple[str, ...] = ()  # labels for the stored study

    def document(self) -> dict[str, Any]:
        """Return the settings that affect the results, as JSON values."""
        names = ("steps", "seed", "rtol", "atol", "no_fallback")
        return {name: getattr(self, name) for name in names} | {
            "allow_blind": list(self.allow_blind),
            "accept": list(self.accept),
        }


def read_study(folder: Path, only: Sequence[str] = ()) -> list[Experiment]:
    """Read the experiments in a study's directory, in list order.

    Args:
        only: names of the experiments to return; empty for all.

    Raises:
        UsageError: the directory is not a study, or lacks an experiment.
    """
    listed = folder / LIST
    try:
        table = parse_toml(read_text(listed), listed)
    except OSError as error:
        raise UsageError(f"{folder} is not a study: {LIST}: {error.strerror}", hint=f"create {LIST}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{listed} cannot be read: {error}") from error
    found = [_experiment(listed, name, entry) for name, entry in table.items()]
    if not found:
        raise UsageError(f"{listed} contains no experiments", hint="add a table per experiment: [NAME]")
    names = [one.name for one in found]
    for name in only:
        if name not in names:
            raise UsageError(f"experiment {name!r} not found", hint=f"{did_you_mean(name, names)}see {listed}")
    return [one for one in found if not only or one.name in only]


def _experiment(listed: Path, name: str, entry: object) -> Experiment:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise UsageError(f"{listed}: [{name}] must be a table of strings")
    if unknown := sorted(set(entry) - {"title", "reported"}):
        raise UsageError(f"{listed}: [{name}]: unknown key {unknown[0]!r}", hint="keys: title, reported")
    path = listed.parent / name / MODEL
    if not is_file(path):
        raise UsageError(f"{listed}: [{name}]: no such file: {path}")
    return Experiment(name, entry.get("title", name), entry.get("reported", ""), path)


SCHEMA = 1
PASSED, FAILED, NOT_REACHED = "pass", "fail", "not reached"


# Row fields that the document contains unchanged.
_PLAIN = ("toolchain", "compiler", "relation", "detail", "steps", "placement")


@dataclass
class StageResult:
    """Result of a row's stage: ``pass``, ``fail`` or ``not reached``, the duration, and the error."""

    name: str
    outcome: str = NOT_REACHED
    seconds: float | None = None
    message: str = ""


@dataclass
class Row:
    """Result of an experiment with a compiler."""

    experiment: Experiment
    toolchain: str
    stages: list[StageResult]
    outcome: Outcome | None = None
    compiler: str = ""
    size: int | None = None  # program size in bytes
    steps: int = 0  # training steps that agreed with TensorFlow
    detail: str = ""  # the tool's error output
    # Over all values in all steps: the largest absolute difference, the tensor and the step.
    worst: dict[str, Any] = field(default_factory=dict)
    program: str = ""  # the program's file in the study's directory, next to the inputs and outputs
    # Placement: fields of :class:`hil.core.results.Part`; None if the runtime did not report it.
    placement: list[dict[str, Any]] | None = None
    relation: str = Relation.INDEPENDENT.value  # relation between TensorFlow's training and the compiled program

    @property
    def failed(self) -> StageResult | None:
        """The stage that failed."""
        return next((stage for stage in self.stages if stage.outcome == FAILED), None)

    def check(self) -> None:
        """Validate the values of a stored row. Raises TypeError or ValueError if hil did not write the row."""
        check_fields(self)
        Relation(self.relation)
        numbers = [self.worst.get("max_abs"), self.size, *(stage.seconds for stage in self.stages)]
        for number in numbers:
            if not isinstance(number, int | float | None):
                raise TypeError(f"{number!r:.80} is not a number")
            if isinstance(number, int) and abs(number) >= 1 << 63:
                raise ValueError("number out of range")

    def document(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        failed = self.failed
        return {
            "experiment": self.experiment.name,
            **{name: getattr(self.experiment, name) for name in ("title", "reported")},
            **{name: getattr(self, name) for name in _PLAIN},
            "outcome": self.outcome and self.outcome.value,
            "stages": [vars(stage) for stage in self.stages],
            "failed_stage": failed.name if failed else "",
            "message": failed.message if failed else "",
            "bytes": self.size,
            "program": self.program,
            "worst": self.worst or None,
        }

    @classmethod
    def of_document(cls, document: Mapping[str, Any], experiment: Experiment) -> Row:
        """Parse a row from :meth:`document`. Raises KeyError, TypeError or ValueError if it is invalid."""
        row = cls(
            experiment,
            toolchain=toolchain_of(document),
            **{name: document[name] for name in _PLAIN if name not in ("toolchain", "placement")},
            placement=document.get("placement"),
            stages=[StageResult(**stage) for stage in document["stages"]],
            outcome=Outcome(document["outcome"]) if document["outcome"] else None,
            size=document["bytes"],
            program=document.get("program", ""),
            worst=document["worst"] or {},
        )
        row.check()
        return row


def toolchain_of(document: Mapping[str, Any]) -> str:
    """Return the toolchain of a stored row, whose key was ``way`` before version 0.1. Raises KeyError without it."""
    return str(document["toolchain"] if "toolchain" in document else document["way"])


def taken_over(stored: Iterable[dict[str, Any]], asked: Sequence[Row]) -> list[Row]:
    """Return the rows of a resumed study: all finished stored rows, and the requested rows that are not finished.

    Rows with a lost board run again. Raises the errors of :meth:`Row.of_document`.
    """
    todo = {(row.experiment.name, row.toolchain): row for row in asked}
    rows = []
    for document in stored:
        new = todo.pop((document["experiment"], toolchain_of(document)), None)
        if document["outcome"] not in {None, *BOARD_OUTCOMES}:
            known = Experiment(document["experiment"], document["title"], document["reported"], Path())
            rows.append(Row.of_document(document, new.experiment if new else known))
        elif new:
            rows.append(new)
    return [*rows, *todo.values()]


def exit_code(rows: Iterable[Row], interrupted: bool) -> int:
    """Return a study's exit code: the most severe among the rows, or that of Ctrl-C."""
    return EXIT_INTERRUPTED if interrupted else exit_code_of(row.outcome for row in rows if row.outcome is not None)


def summary(rows: Sequence[Row]) -> str:
    """Return the number of passed rows, by compiler."""
    parts = []
    for toolchain in dict.fromkeys(row.toolchain for row in rows):
        mine = [row for row in rows if row.toolchain == toolchain]
        parts.append(f"{toolchain}: {sum(row.outcome is Outcome.PASS for row in mine)} of {len(mine)} passed")
    return "; ".join(parts)
