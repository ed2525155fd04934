"""What a study found: a row for each experiment and compiler, and the document that all of them make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.core.config_files import parse_toml
from hil.core.files import read_text
from hil.core.results import BOARD_OUTCOMES, Outcome, Relation, exit_code_of
from hil.errors import EXIT_INTERRUPTED, UsageError, did_you_mean

LIST = "study.toml"
MODEL = "model.py"


@dataclass(frozen=True)
class Experiment:
    """One experiment."""

    name: str
    title: str
    reported: str  # what an older report says became of it; "" where there is none
    path: Path  # its model.py, which has a function ``training(random)``; see docs/tfcompile.md


@dataclass(frozen=True)
class Asked:
    """What a study is asked to do."""

    experiments: Sequence[Experiment]
    ways: Sequence[str]  # which compilers: keys of :data:`hil.controller.workloads.study.toolchains.WAYS`
    steps: int
    seed: int  # of first values and data
    # rtol, atol: within which every loss and variable must agree with TensorFlow's after every step; ``atol`` None
    # follows each tensor's scale and noise, as everywhere.
    rtol: float
    atol: float | None
    allow_blind: tuple[str, ...]  # patterns of names of tensors that may pass though nobody can judge them
    accept: tuple[str, ...]  # criteria that judge tensors instead of the tolerance
    no_fallback: bool  # whether a node that runs on another device than it was told to fails a row
    timeout: float  # seconds for loading, and for each step
    out: Path
    resume: bool  # whether rows that are in the folder already are kept
    labels: tuple[str, ...] = ()  # of what is stored

    def document(self) -> dict[str, Any]:
        """The part that the results depend on, as JSON says it."""
        names = ("steps", "seed", "rtol", "atol", "no_fallback")
        return {name: getattr(self, name) for name in names} | {
            "allow_blind": list(self.allow_blind),
            "accept": list(self.accept),
        }


def read_study(folder: Path, only: Sequence[str] = ()) -> list[Experiment]:
    """The experiments of a study's folder, in the order of its list.

    Args:
        only: names of those to take; none takes all.

    Raises:
        UsageError: it is no study, or has no such experiment.
    """
    listed = folder / LIST
    try:
        table = parse_toml(read_text(listed), listed)
    except OSError as error:
        raise UsageError(f"{folder} is no study: {LIST}: {error.strerror}", hint=f"it needs a {LIST}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{listed} cannot be read: {error}") from error
    found = [_experiment(listed, name, entry) for name, entry in table.items()]
    if not found:
        raise UsageError(f"{listed} lists no experiment", hint="a table for each: [name]")
    names = [one.name for one in found]
    for name in only:
        if name not in names:
            raise UsageError(f"the study has no experiment {name!r}", hint=f"{did_you_mean(name, names)}see {listed}")
    return [one for one in found if not only or one.name in only]


def _experiment(listed: Path, name: str, entry: object) -> Experiment:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise UsageError(f"{listed}: [{name}] is to be a table of texts")
    if unknown := sorted(set(entry) - {"title", "reported"}):
        raise UsageError(f"{listed}: [{name}] has no {unknown[0]!r}", hint="it has title and reported")
    path = listed.parent / name / MODEL
    if not path.is_file():
        raise UsageError(f"{listed} lists {name}, but there is no {path}")
    return Experiment(name, entry.get("title", name), entry.get("reported", ""), path)


SCHEMA = 1
PASSED, FAILED, NOT_REACHED = "pass", "fail", "not reached"


# Fields of a row that its document has as they are.
_PLAIN = ("way", "compiler", "relation", "detail", "steps", "placement")


@dataclass
class StageResult:
    """One stage of a row: ``pass``, ``fail`` or ``not reached``, how long it took, and what went wrong."""

    name: str
    outcome: str = NOT_REACHED
    seconds: float | None = None
    message: str = ""


@dataclass
class Row:
    """One experiment through one compiler."""

    experiment: Experiment
    way: str
    stages: list[StageResult]
    outcome: Outcome | None = None
    compiler: str = ""
    size: int | None = None  # of the program, in bytes
    steps: int = 0  # how many training steps agreed with TensorFlow's
    detail: str = ""  # the far side's own words about what went wrong
    # of all values of all steps: the largest absolute difference, where it was and what stood there.
    worst: dict[str, Any] = field(default_factory=dict)
    program: str = ""  # the program's file in the study's folder; what it was made of and what it gave lie beside it
    # where the program ran: fields of :class:`hil.core.results.Part`; None where the runtime did not tell.
    placement: list[dict[str, Any]] | None = None
    relation: str = Relation.INDEPENDENT.value  # of TensorFlow's training to the compiled program

    @property
    def failed(self) -> StageResult | None:
        """The stage that failed."""
        return next((stage for stage in self.stages if stage.outcome == FAILED), None)

    def document(self) -> dict[str, Any]:
        """As JSON says it."""
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
        """The row that :meth:`document` wrote. Raises KeyError, TypeError or ValueError: it did not."""
        return cls(
            experiment,
            **{name: document[name] for name in _PLAIN if name != "placement"},
            placement=document.get("placement"),
            stages=[StageResult(**stage) for stage in document["stages"]],
            outcome=Outcome(document["outcome"]) if document["outcome"] else None,
            size=document["bytes"],
            program=document.get("program", ""),
            worst=document["worst"] or {},
        )


def taken_over(stored: Iterable[dict[str, Any]], asked: Sequence[Row]) -> list[Row]:
    """The rows of a study that goes on: those that ended earlier, asked for or not, and those still to be done.

    A row that the board was lost in is still to be done. Errors are those of :meth:`Row.of_document`.
    """
    todo = {(row.experiment.name, row.way): row for row in asked}
    rows = []
    for document in stored:
        new = todo.pop((document["experiment"], document["way"]), None)
        if document["outcome"] not in {None, *BOARD_OUTCOMES}:
            known = Experiment(document["experiment"], document["title"], document["reported"], Path())
            rows.append(Row.of_document(document, new.experiment if new else known))
        elif new:
            rows.append(new)
    return [*rows, *todo.values()]


def exit_code(rows: Iterable[Row], interrupted: bool) -> int:
    """The exit code of a study: the gravest of its rows', or that of Ctrl-C."""
    return EXIT_INTERRUPTED if interrupted else exit_code_of(row.outcome for row in rows if row.outcome is not None)


def summary(rows: Sequence[Row]) -> str:
    """How many of the rows passed, by compiler."""
    parts = []
    for way in dict.fromkeys(row.way for row in rows):
        mine = [row for row in rows if row.way == way]
        parts.append(f"{way}: {sum(row.outcome is Outcome.PASS for row in mine)} of {len(mine)} passed")
    return "; ".join(parts)
