"""Suspects of a search: boards that do not exist, and compiler flags of other users in a history."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.histories import history_entry

from hil.controller.pipeline.settings.options import Job
from hil.controller.workloads.gate.bisection.suspect import SuspectRun
from hil.controller.workloads.gate.plan import GateCase
from hil.controller.workloads.gate.stored_cases import StoredRunCases
from hil.errors import UsageError

SAFE = "--iree-opt-level=O2"
LINKER = "--iree-llvmcpu-system-linker-path=/tmp/x"


def make_cases(flags: list[str], *, own: bool) -> StoredRunCases:
    """Return the cases of a run whose program was compiled with flags."""
    cases: Any = StoredRunCases.__new__(StoredRunCases)
    artifact = SimpleNamespace(flags=flags)
    case = SimpleNamespace(name="m", path="m.onnx", artifact=artifact)
    cases.run = SimpleNamespace(id="r2", record=SimpleNamespace(cases=[case]))
    cases.is_own, cases.job = own, Job((), board="sim", compile_flags=tuple(flags))
    return cases


def make_suspect(old: StoredRunCases | None, new: StoredRunCases) -> SuspectRun:
    flags = {"flags": [LINKER]}  # other users can write the entries
    case = GateCase(history_entry("r2", tools=flags), history_entry("r1", tools=flags))
    opener = SimpleNamespace(open=lambda entry: new, find=lambda entry: new if entry is case.new else old)
    restorer: Any = SimpleNamespace(opener=opener, choose_job=lambda cases: cases.job)
    unused: Any = None
    return SuspectRun(restorer, unused, unused, case, unused)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (None, make_cases([], own=True)),
        (make_cases([LINKER], own=False), make_cases([LINKER], own=False)),
    ],
)
def test_flags_that_run_programs_are_refused_from_other_users(old: StoredRunCases | None, new: StoredRunCases) -> None:
    suspect = make_suspect(old, new)
    suspect.check_flags([SAFE])
    with pytest.raises(UsageError, match=f"start programs: {LINKER}\n"):
        suspect.check_flags([SAFE, LINKER])


@pytest.mark.parametrize("number", [0, 1])
def test_flags_of_own_runs_are_used(number: int) -> None:
    runs = [make_cases([LINKER] if number == place else [], own=True) for place in range(2)]
    make_suspect(runs[0], runs[1]).check_flags([SAFE, LINKER])


@pytest.mark.parametrize("own", [True, False])
def test_options_refuse_flags_of_another_users_job(own: bool) -> None:
    suspect = make_suspect(None, make_cases([LINKER], own=own))
    if own:
        assert suspect._options.compile_flags == (LINKER,)
        return
    with pytest.raises(UsageError, match="another user chose compiler flags"):
        _ = suspect._options


def test_suspect_with_unknown_board_cannot_be_searched() -> None:
    """The board of the stored run can be removed later. Other suspects can still be searched."""
    cases = make_cases([], own=True)
    cases.job = Job((), board="removed")
    with pytest.raises(UsageError, match="removed"):
        make_suspect(None, cases)
