"""Experiments and settings of a study, and the rows of a resumed study."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hil.controller.records.study import StudyRow, StudySettings
from hil.controller.storage.paths import is_file
from hil.core.config_files import parse_toml
from hil.core.files import read_text
from hil.core.results import BOARD_OUTCOMES, Outcome, exit_code_of
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
    # rtol, atol: tolerance for losses and variables against TensorFlow after each step. If ``atol`` is None, hil
    # derives it from the tensor's scale and noise, as in other workloads.
    rtol: float
    atol: float | None
    allow_blind: tuple[str, ...]  # name patterns for tensors that may pass although they cannot be judged
    accept: tuple[str, ...]  # criteria that replace the tolerance
    no_fallback: bool  # whether a node on an unrequested device fails a row
    timeout: float  # seconds for the load, and for every step
    out: Path
    resume: bool  # whether to keep the finished rows in the directory
    labels: tuple[str, ...] = ()  # labels for the stored study

    @property
    def settings(self) -> StudySettings:
        """The settings that affect the results."""
        return StudySettings(
            steps=self.steps,
            seed=self.seed,
            rtol=self.rtol,
            atol=self.atol,
            no_fallback=self.no_fallback,
            allow_blind=list(self.allow_blind),
            accept=list(self.accept),
        )


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
    found = [_read_experiment(listed, name, entry) for name, entry in table.items()]
    if not found:
        raise UsageError(f"{listed} contains no experiments", hint="add a table per experiment: [NAME]")
    names = [one.name for one in found]
    for name in only:
        if name not in names:
            raise UsageError(f"experiment {name!r} not found", hint=f"{did_you_mean(name, names)}see {listed}")
    return [one for one in found if not only or one.name in only]


def _read_experiment(listed: Path, name: str, entry: object) -> Experiment:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise UsageError(f"{listed}: [{name}] must be a table of strings")
    if unknown := sorted(set(entry) - {"title", "reported"}):
        raise UsageError(f"{listed}: [{name}]: unknown key {unknown[0]!r}", hint="keys: title, reported")
    path = listed.parent / name / MODEL
    if not is_file(path):
        raise UsageError(f"{listed}: [{name}]: no such file: {path}")
    return Experiment(name, entry.get("title", name), entry.get("reported", ""), path)


def merge_rows(stored: Iterable[StudyRow], asked: Sequence[StudyRow]) -> list[StudyRow]:
    """Return the rows of a resumed study: all finished stored rows, and the requested rows that are not finished.

    Rows with a lost board run again.
    """
    todo = {(row.experiment, row.toolchain): row for row in asked}
    rows = []
    for row in stored:
        new = todo.pop((row.experiment, row.toolchain), None)
        if row.outcome not in {None, *BOARD_OUTCOMES}:
            rows.append(row.replace(title=new.title, reported=new.reported) if new else row)
        elif new:
            rows.append(new)
    return [*rows, *todo.values()]


def exit_code(rows: Iterable[StudyRow], interrupted: bool) -> int:
    """Return a study's exit code: the most severe exit code of the rows, or the exit code of Ctrl-C."""
    return EXIT_INTERRUPTED if interrupted else exit_code_of(row.outcome for row in rows if row.outcome is not None)


def summarize_rows(rows: Sequence[StudyRow]) -> str:
    """Return the number of passed rows, by compiler."""
    parts = []
    for toolchain in dict.fromkeys(row.toolchain for row in rows):
        mine = [row for row in rows if row.toolchain == toolchain]
        parts.append(f"{toolchain}: {sum(row.outcome is Outcome.PASS for row in mine)} of {len(mine)} passed")
    return "; ".join(parts)
