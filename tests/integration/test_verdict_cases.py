"""Every verdict case gives its required outcome in every workload that it names."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import verdict_cases
from support.commands import Ended
from support.verdict_cases import VerdictCase
from support.verdict_cases.examples import CASES as EXAMPLES
from support.verdict_cases.workloads import hw_type_of, run_bundle, run_case, run_pytest, run_suite, shared_options

import hil as library

MODULES = [f"support.verdict_cases.{info.name}" for info in pkgutil.iter_modules(verdict_cases.__path__)]
CASES: list[VerdictCase] = [case for name in MODULES for case in getattr(importlib.import_module(name), "CASES", [])]

GROUPS = {
    options: list(cases) for options, cases in itertools.groupby(sorted(CASES, key=shared_options), key=shared_options)
}


def marks_for(cases: Iterable[VerdictCase]) -> list[Any]:
    """Return the marks of cases that daily tests skip: each workload takes seconds."""
    return [] if any(case in EXAMPLES for case in cases) else [pytest.mark.slow]


def named(workload: str) -> list[Any]:
    chosen = [case for case in CASES if workload in case.workloads]
    # Suites run the examples, too. Of the other cases, every sixth runs on every change.
    daily = {
        "run": [*chosen[::6], *(case for case in EXAMPLES if "suite" not in case.workloads)],
        "bundle": [case for case in chosen if case in EXAMPLES][::4],
    }
    return [
        pytest.param(case, id=case.name, marks=[] if case in daily[workload] else [pytest.mark.slow]) for case in chosen
    ]


def grouped(workload: str) -> list[Any]:
    found = []
    for options, cases in GROUPS.items():
        chosen = [case for case in cases if workload in case.workloads]
        examples, others = ([one for one in chosen if (one in EXAMPLES) is wanted] for wanted in (True, False))
        for kind, some in (("examples", examples), ("others", others)):
            if some:
                found.append(pytest.param(some, id=" ".join([kind, *options]), marks=marks_for(some)))
    return found


def wrong(cases: list[VerdictCase], found: dict[str, str]) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {case.name: (found[case.name], case.outcomes) for case in cases if found[case.name] not in case.outcomes}


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Iterator[Callable[[str], Any]]:
    """Open one simulator of each type and share it among the cases."""
    opened: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HIL_CACHE_DIR", str(shared_cache))

        def board_of(hw_type: str) -> Any:
            if hw_type not in opened:
                opened[hw_type] = library.connect(hw_type=hw_type)
            return opened[hw_type]

        yield board_of
        for board in opened.values():
            board.close()


def test_case_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", named("run"))
def test_run_gives_required_outcome(case: VerdictCase, tmp_path: Path, boards: Callable[[str], Any]) -> None:
    outcome, record = run_case(case, tmp_path, boards(hw_type_of(case)))
    assert outcome in case.outcomes, record
    assert [text for text in case.says if text not in record] == []


@pytest.mark.parametrize("case", named("bundle"))
def test_bundle_gives_required_outcome(
    case: VerdictCase, tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HIL_CACHE_DIR", str(shared_cache))
    assert run_bundle(case, tmp_path) in case.outcomes


@pytest.mark.parametrize("cases", grouped("suite"))
def test_suite_gives_required_outcomes(cases: list[VerdictCase], tmp_path: Path, hil: Callable[..., Ended]) -> None:
    assert wrong(cases, run_suite(cases, tmp_path, hil)) == {}


@pytest.mark.parametrize("cases", grouped("pytest"))
def test_pytest_gives_required_outcomes(cases: list[VerdictCase], tmp_path: Path, environment: dict[str, str]) -> None:
    assert wrong(cases, run_pytest(cases, tmp_path, environment)) == {}
