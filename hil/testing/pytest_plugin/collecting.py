"""From models to tests: a model's file holds the tests of its cases, and a user's tests are multiplied by cases."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hil.compare.verdict import Verdict
from hil.core.results import RunResult
from hil.core.text import visible
from hil.errors import HilError
from hil.testing.pytest_plugin.session import BENCH, Bench, HilCase, ModelFolder

# The fixture that knows a test's case; all others build on it.
CASE = "hil_case"


def passes(hil_result: RunResult, hil_reference: RunResult, hil_compare: Callable[[], Verdict]) -> None:
    """The test of a case: what the board gives is what the reference gives."""
    hil_compare()


class ModelCase(pytest.Function):
    """One case of a model."""

    case: HilCase

    def reportinfo(self) -> tuple[Path, None, str]:
        """The model, not the lines of ours that test it."""
        return self.path, None, self.name


class ModelFile(pytest.Module):
    """A model's file. A module without anything of Python's, so that fixtures of whatever scope work."""

    obj = None

    def collect(self) -> Iterator[ModelCase]:
        """The cases of the model."""
        bench = self.config.stash[BENCH]
        folder = bench.folder_of(self.path)
        assert folder is not None
        if self.path not in folder.specs:
            # All that are going to be asked for, read side by side.
            _cases(bench, folder, {self.path, *filter(self._is_asked_for, folder.models)})
        for case in _cases(bench, folder, [self.path]):
            item = ModelCase.from_parent(self, name=case.id, callobj=passes)
            item.case = case
            item.add_marker("hil")
            yield item

    def _is_asked_for(self, file: Path) -> bool:
        here = self.config.invocation_params.dir
        asked = [here / argument.partition("::")[0] for argument in self.config.args]
        return any(file == path or path in file.parents for path in asked)


def multiply(metafunc: pytest.Metafunc) -> None:
    """Run a user's test with every case that its marker lets through.

    Raises:
        CollectError: the marker says something that it cannot.
    """
    bench = metafunc.config.stash.get(BENCH, None)
    if bench is None:
        raise pytest.Collector.CollectError(
            f"{metafunc.function.__name__} asks for hil's fixtures, but no models are named\n"
            "  hint: set hil_models in the ini file, a folder with models"
        )
    chosen = _chosen(metafunc.definition.iter_markers("hil"))
    cases = [case for folder in bench.folders for case in _cases(bench, folder, folder.models) if chosen(case)]
    metafunc.parametrize(CASE, cases, indirect=True, ids=[case.id for case in cases])


def _cases(bench: Bench, folder: ModelFolder, files: Iterable[Path]) -> list[HilCase]:
    try:
        return bench.cases(folder, files)
    except HilError as error:
        raise pytest.Collector.CollectError(visible(str(error))) from None


def _chosen(markers: Iterator[pytest.Mark]) -> Callable[[HilCase], bool]:
    """Whether all of a test's markers let a case through."""
    wanted = [_checked(marker.args, marker.kwargs) for marker in markers]
    return lambda case: all(_fits(case, one) for one in wanted)


def _checked(arguments: tuple[Any, ...], wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    wrong = [repr(argument) for argument in arguments]
    kinds = {"models": str, "ops": str, "layers": bool}
    for name, value in wanted.items():
        if not isinstance(value, kinds.get(name, ())):
            wrong.append(f"{name}={value!r}")
    if wrong:
        raise pytest.Collector.CollectError(
            f"pytest.mark.hil takes models=PATTERN, ops=PATTERN and layers=True or False, not {wrong[0]}"
        )
    return wanted


def _fits(case: HilCase, wanted: Mapping[str, Any]) -> bool:
    spec = case.spec
    return (
        fnmatch.fnmatchcase(spec.model, wanted.get("models", "*"))
        and fnmatch.fnmatchcase(spec.op, wanted.get("ops", "*"))
        and wanted.get("layers", bool(spec.layer)) == bool(spec.layer)
    )
