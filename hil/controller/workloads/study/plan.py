"""What a study consists of: a folder of experiments, each a ``model.py``, listed in ``study.toml``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.core.config_files import parse_toml
from hil.core.files import read_text
from hil.errors import UsageError, did_you_mean

LIST = "study.toml"
MODEL = "model.py"


@dataclass(frozen=True)
class Experiment:
    """One experiment.

    Attributes:
        name: its folder's.
        title: what it is, for people.
        reported: what an older report says became of it; "" where there is none.
        path: its model.py, which has a function ``training(random)``; see docs/tfcompile.md.
    """

    name: str
    title: str
    reported: str
    path: Path


@dataclass(frozen=True)
class Asked:
    """What a study is asked to do.

    Attributes:
        experiments: which ones, in order.
        ways: which compilers: keys of :data:`hil.controller.workloads.study.toolchains.WAYS`.
        steps: training steps that are compared.
        seed: of first values and data.
        rtol, atol: within which every loss and variable must agree with TensorFlow's after every step; ``atol`` None
            follows each tensor's scale and noise, as everywhere.
        allow_blind: patterns of names of tensors that may pass though nobody can judge them.
        no_fallback: whether a node that runs on another device than it was told to fails a row.
        timeout: seconds for loading, and for each step.
        out: the folder where everything is stored.
        resume: whether rows that are in the folder already are kept.
    """

    experiments: Sequence[Experiment]
    ways: Sequence[str]
    steps: int
    seed: int
    rtol: float
    atol: float | None
    allow_blind: tuple[str, ...]
    no_fallback: bool
    timeout: float
    out: Path
    resume: bool

    def told(self) -> dict[str, Any]:
        """The part that the results depend on, as JSON says it."""
        names = ("steps", "seed", "rtol", "atol", "no_fallback")
        return {name: getattr(self, name) for name in names} | {"allow_blind": list(self.allow_blind)}


def read_study(folder: Path, only: Sequence[str] = ()) -> list[Experiment]:
    """The experiments of a study's folder, in the order of its list.

    Args:
        folder: with the list.
        only: names of those to take; none takes all.

    Raises:
        UsageError: it is no study, or has no such experiment.
    """
    listed = folder / LIST
    try:
        table = parse_toml(read_text(listed), listed)
    except OSError as error:
        raise UsageError(f"{folder} is no study: {LIST}: {error.strerror}", hint=f"it needs a {LIST}") from error
    except ValueError as error:
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
