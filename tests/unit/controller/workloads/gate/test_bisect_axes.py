"""Axes of a search: candidates, and the program of each candidate."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.histories import history_entry

from hil.controller.records.base import make_record
from hil.controller.records.decisions.gate import GateCandidate, GateSide, GateVerdict
from hil.controller.workloads.gate.bisection.axes import compilers
from hil.controller.workloads.gate.bisection.axes.axis import BisectAxis
from hil.controller.workloads.gate.bisection.axes.compilers import CompilerAxis
from hil.controller.workloads.gate.bisection.axes.drivers import DriverAxis
from hil.controller.workloads.gate.bisection.axes.flags import FlagAxis, list_flag_steps
from hil.controller.workloads.gate.bisection.axes.worktree import BuiltCompilerAxis, CommitAxis
from hil.controller.workloads.gate.bisection.over import plan_search
from hil.controller.workloads.gate.bisection.suspect import SuspectRun
from hil.controller.workloads.gate.plan import GateCase
from hil.core.board_config import BoardConfig
from hil.errors import UsageError

CONFIG = BoardConfig("lab", "sim", compile_flags={"iree": ("--of-board",)})
ANY: Any = None


def make_case(old: list[str], new: list[str], **values: Any) -> GateCase:
    """Return a case whose measurements have different flags and programs."""
    known = {"commit": "c" * 40, **values}
    tools = [{"compiler": "iree 3.13.0", "runtime": "3.13.0", "flags": flags} for flags in (old, new)]
    before = history_entry("r1", tools=tools[0], program="a")
    return GateCase(history_entry("r2", **{"tools": tools[1], "program": "b", **known}), before)


def make_verdict(name: str, outcome: str = "FAIL") -> GateVerdict:
    side = GateSide(commit="", run="r2", outcome=outcome, reason="", p50_ns=None, compiler="", runtime="", program="")
    key = {"kind": "run", "model": "m", "case": "m", "board": "lab", "runtime": "iree"}
    values = {"series": "s", "key": key, "verdict": name, "reason": "", "suspect": "", "new": side.to_json()}
    return make_record({**values, "old": None}, GateVerdict)


class FakeSuspect:
    """Suspect that records its compilations and released boards."""

    def __init__(self, case: GateCase, events: list[str] | None = None, context: str = "default") -> None:
        self.case, self.events, self.context = case, [] if events is None else events, context

    @property
    def board(self) -> str:
        return self.case.new.key.board

    @property
    def runner(self) -> Any:
        return FakeRunner(self)

    def begin_judged(self, folder: Path) -> Any:
        return FakeProgram(FakeOptions(("--of-user",)))

    def check_flags(self, flags: Any) -> None:
        self.events.append(f"checked {' '.join(flags)}")

    def release_board(self) -> None:
        self.events.append("released")


@dataclasses.dataclass(frozen=True)
class FakeOptions:
    compile_flags: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class FakeProgram:
    options: FakeOptions


@dataclasses.dataclass(frozen=True)
class FakeRunner:
    """Runner whose compiled case is a text: context and flags."""

    suspect: Any
    context: Any = None

    def compile(self, case: Any, config: BoardConfig) -> Any:
        folders = self.context.isolated.folders if self.context is not None else ()
        return folders, (*config.compile_flags.get("iree", ()), *case.options.compile_flags)


FLAGS = st.lists(st.sampled_from(["-a", "-b", "--x=1", "--x=2", "--y=1", "--y=2"]), max_size=6)


@given(FLAGS, FLAGS)
def test_flag_steps_lead_from_old_to_new_flags(old: list[str], new: list[str]) -> None:
    steps = [list(flags) for flags in list_flag_steps(old, new).values()]
    assert (steps[0], steps[-1]) == (old, new)
    assert (len(steps) == 1) == (old == new)
    names = [{flag.partition("=")[0] for flag in set(one) ^ set(other)} for one, other in itertools.pairwise(steps)]
    assert all(len(changed) <= 1 for changed in names)


@pytest.mark.parametrize(
    ("old", "new", "labels"),
    [
        (["-a", "--x=1"], ["-a", "--x=2", "-b"], ["--x=1 -> --x=2", "-b added"]),
        (["-a", "-b"], ["-b"], ["-a removed"]),
        (["-a", "-b"], ["-b", "-a"], ["order of the flags"]),
        (["--x=1"], ["--x=1", "--x=2"], ["--x=1 -> --x=1 --x=2"]),
    ],
)
def test_flag_steps_name_differences(old: list[str], new: list[str], labels: list[str]) -> None:
    assert list(list_flag_steps(old, new)) == ["flags of the baseline", *labels]


def test_flag_axis_compiles_judged_model_with_first_differences(tmp_path: Path) -> None:
    case = make_case(["--x=1", "--y=1"], ["--x=2", "--y=2"])
    found = FlagAxis().find_candidates(case, make_verdict("broken"))
    suspect: Any = FakeSuspect(case)
    made = [FlagAxis().make_program(suspect, one, tmp_path, CONFIG) for one in found.candidates]
    assert made == [((), ("--x=1", "--y=1")), ((), ("--x=2", "--y=1")), ((), ("--x=2", "--y=2"))]
    assert suspect.events == ["checked --x=1 --y=1", "checked --x=2 --y=1", "checked --x=2 --y=2"]


@pytest.mark.parametrize(
    ("axis", "values", "reason"),
    [
        (FlagAxis(), {}, "the compiler flags of both measurements are equal"),
        (FlagAxis(), {"tools": {"flags": ["-b"]}, "program": "a"}, "both measurements ran the same program"),
        (
            CompilerAxis(["1", "2"], ANY),
            {"key": {"runtime": "onnxruntime"}},
            "cannot install compilers for the runtime",
        ),
        (CompilerAxis(["1", "2"], ANY), {"tools": {"compiler": "none"}}, "did not compile the program of r2"),
        (CompilerAxis(["1", "2"], ANY), {"program": "a"}, "both measurements ran the same program"),
        (BuiltCompilerAxis(ANY, "make", 1, ["1", "2"]), {"commit": ""}, "does not name its commit"),
    ],
)
def test_axis_without_candidates_says_why(axis: BisectAxis, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        axis.find_candidates(make_case(["-a"], ["-a"], **values), make_verdict("broken"))


def test_compiler_axis_compiles_with_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(package: str, version: str, **_: Any) -> Path:
        if version == "9":
            raise UsageError("cannot install iree-base-compiler 9")
        return tmp_path / version

    monkeypatch.setattr(compilers, "install_compiler", install)
    monkeypatch.setattr(compilers, "require_version", lambda package: "3")
    own = SimpleNamespace(cache=None, isolated=SimpleNamespace(workers=1, folders=()))
    axis, suspect = CompilerAxis(["1", "3", "9"], own), FakeSuspect(make_case(["-a"], ["-a"]))  # type: ignore[arg-type]
    made = {}
    with axis.open_search():
        for one in axis.find_candidates(suspect.case, make_verdict("toolchain")).candidates:
            made[one.value] = axis.prepare(one, [suspect], tmp_path)  # type: ignore[list-item]
            if not made[one.value]:
                made[one.value] = axis.make_program(suspect, one, tmp_path, CONFIG)  # type: ignore[arg-type]
    flags = ("--of-board", "--of-user")
    # The installed version needs no second installation.
    assert made == {"1": ((str(tmp_path / "1"),), flags), "3": ((), flags), "9": "cannot install iree-base-compiler 9"}


class FakeGit:
    """Repository whose worktree is a directory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.commits = folder, []

    @contextlib.contextmanager
    def open_worktree(self) -> Iterator[Any]:
        yield self

    def check_out(self, commit: str) -> None:
        self.commits.append(commit)


@pytest.mark.parametrize(
    ("axis", "candidate", "printed"),
    [
        (lambda git, command: CommitAxis(git, command, 9), GateCandidate(commit="1" * 40), f"{'1' * 40} -"),
        (
            lambda git, command: BuiltCompilerAxis(git, command, 9, ["13.2", "14.1"]),
            GateCandidate(value="14.1"),
            f"{'c' * 40} 14.1",
        ),
    ],
)
def test_command_builds_candidate_in_worktree(
    axis: Any, candidate: GateCandidate, printed: str, tmp_path: Path
) -> None:
    git, suspect = FakeGit(tmp_path), FakeSuspect(make_case([], []))
    found = axis(git, "echo $HIL_COMMIT ${HIL_COMPILER:--} > built")
    with found.open_search():
        assert found.prepare(candidate, [suspect], tmp_path) == ""
    assert (tmp_path / "built").read_text().strip() == printed
    assert git.commits == [printed.split()[0]]


@pytest.fixture
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Axis of the drivers 1, 2 and 3. The command appends to the file `log`, and fails for version 2."""
    monkeypatch.chdir(tmp_path)
    screen = SimpleNamespace(note=lambda text: None)
    command = "echo $HIL_BOARD $HIL_DRIVER >> log; test $HIL_DRIVER != 2"
    return DriverAxis(command, 9, ["1", "2", "3"], tmp_path, screen)  # type: ignore[arg-type]


def make_driver_suspect(board: str, events: list[str] | None = None) -> Any:
    return FakeSuspect(make_case([], [], key={"board": board}), events)


def test_driver_axis_installs_on_each_board_and_restores_last_version(drivers: DriverAxis, tmp_path: Path) -> None:
    events: list[str] = []
    suspects = [make_driver_suspect(name, events) for name in ("a", "a", "b")]
    with pytest.raises(KeyboardInterrupt), drivers.open_search():
        assert drivers.prepare(GateCandidate(value="3"), suspects, tmp_path) == ""
        assert drivers.prepare(GateCandidate(value="1"), suspects[:1], tmp_path) == ""
        raise KeyboardInterrupt
    assert (tmp_path / "log").read_text().splitlines() == ["a 3", "b 3", "a 1", "a 3"]
    assert events == ["released"] * 4


def test_driver_axis_restores_board_after_failed_installation(drivers: DriverAxis, tmp_path: Path) -> None:
    with drivers.open_search():
        problem = drivers.prepare(GateCandidate(value="2"), [make_driver_suspect("a")], tmp_path)
    assert problem.startswith("the command ended with exit code 1; see")
    assert (tmp_path / "log").read_text().splitlines() == ["a 2", "a 3"]


def test_driver_axis_restores_other_boards_after_error(drivers: DriverAxis, tmp_path: Path) -> None:
    with drivers.open_search():
        assert drivers.prepare(GateCandidate(value="1"), [make_driver_suspect(name) for name in "ab"], tmp_path) == ""
        (tmp_path / "driver-a.log").mkdir()
    assert (tmp_path / "log").read_text().splitlines() == ["a 1", "b 1", "b 3"]


@pytest.mark.parametrize(
    ("verdict", "outcome", "is_searched"),
    [("board fault", "FAIL", True), ("board fault", "PASS", False), ("board fault", "BOARD_LOST", False)],
)
def test_driver_axis_searches_board_faults_with_failures(
    drivers: DriverAxis, verdict: str, outcome: str, is_searched: bool
) -> None:
    assert drivers.is_searchable(make_verdict(verdict, outcome)) == is_searched


def test_toolchain_verdict_has_no_bad_commit() -> None:
    verdict = make_verdict("toolchain")
    axes = [CommitAxis(ANY, "", 1), FlagAxis(), CompilerAxis(["1", "2"], ANY), BuiltCompilerAxis(ANY, "", 1, [])]
    assert [axis.is_searchable(verdict) for axis in axes] == [False, True, True, True]


def test_driver_axis_does_not_compare_times(drivers: DriverAxis) -> None:
    with pytest.raises(UsageError, match="only for wrong programs"):
        drivers.find_candidates(make_case([], []), make_verdict("regressed", "PASS"))


@pytest.mark.parametrize(
    ("over", "command", "kind"),
    [
        ("commit", None, None),
        ("flag", None, FlagAxis),
        ("compiler=1.0,1.1+cpu", None, CompilerAxis),
        ("driver= 1 , 2 ", "make", DriverAxis),
    ],
)
def test_over_selects_axis(over: str, command: str | None, kind: type[BisectAxis] | None) -> None:
    search = plan_search(over, command, 1)
    axis = search and search.make_axis(search.open_repository(), ANY, ANY, Path())
    assert (type(axis) if axis else None) == kind


@pytest.mark.parametrize("command", ["make", ""])
def test_command_builds_commits_or_compilers(command: str) -> None:
    git: Any = FakeGit(Path())
    kinds = [
        type(search.make_axis(git, ANY, ANY, Path()))
        for over in ("commit", "compiler=1,2")
        if (search := plan_search(over, command, 1)) is not None
    ]
    assert kinds == [CommitAxis, BuiltCompilerAxis]


@pytest.mark.parametrize(
    ("over", "command", "message"),
    [
        ("flags", None, "unknown axis"),
        ("flag=1", None, "flag has no values"),
        ("commit=1", "make", "commit has no values"),
        ("flag", "make", "does not use --bisect"),
        ("compiler=1", None, "at least two different versions"),
        ("compiler=1,1", None, "at least two different versions"),
        ("compiler=1,2 @ file:///x", None, "invalid version '2 @ file:///x'"),
        ("compiler=1,-r", None, "invalid version"),
        ("driver=1,2", None, "requires --bisect COMMAND"),
        ("driver=1,2", " ", "requires --bisect COMMAND"),
    ],
)
def test_invalid_over_is_refused(over: str, command: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_search(over, command, 1)


@pytest.mark.parametrize(("flags", "is_own", "begun"), [(["--x"], False, 0), (["--x"], True, 1), ([], False, 1)])
def test_judged_model_is_not_compiled_with_flags_of_other_users(
    tmp_path: Path, flags: list[str], is_own: bool, begun: int
) -> None:
    models: list[Path] = []

    def begin(model: Path, *_: Any, **__: Any) -> Any:
        models.append(model)
        return SimpleNamespace(model=None)

    suspect: Any = SimpleNamespace(
        case=make_case([], flags),
        runner=SimpleNamespace(begin=begin),
        _cases=SimpleNamespace(is_own=is_own),
        _run=SimpleNamespace(id="r2"),
        _stored=SimpleNamespace(inputs=["x"], name="m", path="m.onnx"),
        _options=SimpleNamespace(compile_flags=tuple(flags)),
    )
    with contextlib.nullcontext() if begun else pytest.raises(UsageError, match="cannot trust the compiler flags"):
        SuspectRun.begin_judged(suspect, tmp_path)
    assert len(models) == begun
