"""`hil doctor`: checks of packages, directories and programs, and the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from support.schemas import check_document

from hil.controller.cli.main import cli
from hil.controller.projects.doctor import checks, packages, places, programs
from hil.controller.records.commands.boards import BoardCheck
from hil.controller.records.commands.projects import EnvironmentCheck
from hil.core.install_hints import make_install_command
from hil.errors import UsageError

ROOT = Path(__file__).parents[4]


def states(found: Iterator[EnvironmentCheck]) -> dict[str, tuple[str, str, str]]:
    return {one.name: (one.state, one.found, one.fix) for one in found}


def requirements(*texts: str) -> list[Requirement]:
    return [Requirement(text) for text in texts]


def test_required_packages_are_compared_with_their_range() -> None:
    version = metadata.version("numpy")
    found = states(
        packages.check_required(
            requirements(
                "numpy>=1",
                "click>=99,<100",
                "no-such-package>=1,<2",
                "tomli>=99; python_version < '3'",
                "tokenizers>=99; extra == 'generation'",
            )
        )
    )
    assert found["package numpy"] == ("pass", f"{version} (>=1)", "")
    assert found["package click"][0] == "fail" and found["package click"][1].endswith(", requires <100,>=99")
    assert found["package click"][2] == "pip install 'click<100,>=99'"
    assert found["package no-such-package"][:2] == ("fail", "not installed")
    assert len(found) == 3


def test_python_is_compared_with_its_range() -> None:
    assert packages.check_python("3.11.7", ">=3.10,<3.14").state == "pass"
    old = packages.check_python("3.9.2", ">=3.10,<3.14")
    assert (old.state, old.fix) == ("fail", "create the environment with Python >=3.10,<3.14")


def test_missing_extras_are_notes() -> None:
    listed = requirements(
        "numpy>=1",
        "numpy>=1; extra == 'agent'",
        "no-such-package>=1; extra == 'torch'",
        "hil[torch]; extra == 'executorch'",
        "click>=1; extra == 'executorch'",
        "pytest>=1; extra == 'pytest'",
        "ruff>=1; extra == 'dev'",
    )
    found = states(packages.check_extras(listed, ["agent", "torch", "executorch", "pytest", "dev"]))
    assert found == {
        "extra torch": ("note", "no-such-package not installed", make_install_command("torch")),
        "extra executorch": ("note", "no-such-package not installed", make_install_command("executorch")),
        "extra pytest": ("pass", f"pytest {metadata.version('pytest')}", ""),
    }


def test_metadata_of_hil_is_readable() -> None:
    found = states(packages.check_packages())
    assert {"hil", "python", "package numpy", "package click", "extra pytest"} <= found.keys()
    assert {state for name, (state, *_) in found.items() if not name.startswith("extra ")} == {"pass"}


def test_broken_plugins_are_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "broken-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[hil.compilers]\nbad = no_such_module:X\ngood = json:loads\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = states(packages.check_plugins())
    assert found["plugin good"] == ("pass", "hil.compilers, package broken", "")
    state, text, fix = found["plugin bad"]
    assert (state, fix) == ("note", "pip uninstall broken") and "no_such_module" in text


def test_unwritable_cache_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path / "file"))
    state, text, fix = states(places.check_places(tmp_path))["cache"]
    assert state == "fail" and str(tmp_path / "file") in text and fix == "set HIL_CACHE_DIR to a writable directory"


@pytest.mark.parametrize(("free", "state"), [(1 << 20, "fail"), (500 << 20, "note"), (5 << 30, "pass")])
def test_free_space_is_compared_with_limits(
    free: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": free})())
    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path))
    found = states(places.check_places(tmp_path))
    assert (found["disk of the cache"][0], found["disk of this directory"][0]) == (state, state.replace("fail", "note"))


def test_missing_shared_memory_fails(tmp_path: Path) -> None:
    found = places.check_shared_memory(tmp_path / "shm")
    assert found.state == "fail" and "mount -t tmpfs" in found.fix


def test_project_file_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "hil.toml"

    def check(text: str) -> tuple[str, str, str]:
        path.write_text(text)
        return states(places.check_places(tmp_path))["project file"]

    assert check("[defaults]\nseed = 3\n") == ("pass", str(path), "")
    assert check("[defaults]\nseeed = 3\n")[0] == "fail"
    needs = f"{path} needs trust: [defaults] board"
    assert check('[defaults]\nboard = "root@rpi5"\n') == ("note", needs, f"hil board trust {tmp_path}")


def test_missing_programs_are_notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(programs, "check_virtual_boards", lambda _: iter(()))
    found = states(programs.check_programs())
    assert {name: state for name, (state, *_) in found.items()} == {"ssh": "note", "git": "note", "browser": "note"}
    assert all(fix for *_, fix in found.values())


@pytest.mark.parametrize(
    ("printed", "state", "text"),
    [
        ('{"found": "namespaces work", "problem": "", "fix": ""}', "pass", "namespaces work"),
        ('{"found": "", "problem": "virtual boards require root", "fix": "run as root"}', "note", "require root"),
        ("", "note", "the check failed"),
    ],
)
def test_virtual_boards_are_checked_in_a_checkout(
    printed: str, state: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(programs.check_virtual_boards(tmp_path)) == []  # as in a wheel
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/virtual-board").touch()
    monkeypatch.setattr(
        "subprocess.run", lambda command, **_: subprocess.CompletedProcess(command, 0, stdout=printed, stderr="")
    )
    (found,) = programs.check_virtual_boards(tmp_path)
    assert found.state == state and text in found.found


def test_script_for_virtual_boards_reports_missing_tools(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.virtual_board.cli", "check"],
        cwd=ROOT,
        env={"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    report = json.loads(done.stdout)
    assert done.returncode == 2 and report["problem"] and report["fix"]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Call `hil doctor` with these checks."""

    def call(found: list[EnvironmentCheck], *words: str) -> Any:
        monkeypatch.setattr(checks, "check_environment", lambda here, *, runs_model: iter(found))
        return CliRunner().invoke(cli, ["doctor", *words], standalone_mode=False, catch_exceptions=False)

    return call


def test_doctor_exit_code_depends_on_required_parts(doctor: Callable[..., Any]) -> None:
    fine = EnvironmentCheck("package numpy", "pass", "2.3 (>=2)")
    note = EnvironmentCheck("extra torch", "note", "torch not installed", "pip install 'hil[torch]'")
    broken = EnvironmentCheck("package onnx", "fail", "not installed", "pip install onnx")
    done = doctor([fine, fine, note])
    assert done.return_value == 0
    assert done.stdout.splitlines() == [
        "pass  packages                2 required packages (hil doctor --all)",
        "note  extra torch             torch not installed",
        "                              fix: pip install 'hil[torch]'",
        "everything that hil requires works",
    ]
    done = doctor([fine, broken, note], "--all")
    assert done.return_value == 2
    assert done.stdout.splitlines()[1:3] == [
        "FAIL  package onnx            not installed",
        "                              fix: pip install onnx",
    ]
    assert done.stdout.splitlines()[-1] == "FAIL: package onnx"
    document = json.loads(doctor([fine, broken], "--json").stdout)
    check_document(document, "doctor")
    assert (document["ok"], document["exit_code"], len(document["checks"])) == (False, 2, 2)


def test_doctor_reports_package_that_stops_a_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop() -> Iterator[EnvironmentCheck]:
        raise ModuleNotFoundError("No module named 'x'", name="x")
        yield

    monkeypatch.setattr(checks, "check_packages", stop)
    monkeypatch.setattr(checks, "_check_programs", stop)
    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path))
    found = states(checks.check_environment(tmp_path, runs_model=False))
    assert found["packages"][:2] == found["programs"][:2] == ("fail", "cannot check: No module named 'x'")
    assert found["cache"][0] == "pass"


def test_command_reports_missing_package_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'msgspec'", name="msgspec")

    monkeypatch.setattr("importlib.import_module", find)
    error = CliRunner().invoke(cli, ["doctor"]).exception
    assert isinstance(error, UsageError)
    assert error.message == "hil doctor requires msgspec, which is not installed" and "pip check" in error.hint


@pytest.mark.ci
def test_doctor_runs_model_on_simulator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path))
    found = states(checks.check_simulator())
    assert found["simulator"] == ("pass", "a tiny model runs and returns correct outputs", "")
    assert found["sandbox"][0] in ("pass", "note")  # some kernels do not support it


@pytest.mark.parametrize(
    ("setting", "said", "sandbox"),
    [
        ("auto", [], "pass"),
        ("auto", ["not sandboxed: no user namespaces; programs run with all your permissions"], "note"),
        ("off", [], "note"),
    ],
)
def test_doctor_reports_missing_sandbox(
    setting: str, said: list[str], sandbox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(choice: Any, *, say: Callable[[str], None]) -> Iterator[BoardCheck]:
        for line in said:
            say(line)
        yield BoardCheck("program", "pass", "a tiny model runs")

    monkeypatch.setattr("hil.controller.workloads.board_checks.check_board", check)
    monkeypatch.setenv("HIL_SANDBOX", setting)
    assert states(checks.check_simulator())["sandbox"][0] == sandbox


def test_doctor_fails_if_simulator_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [BoardCheck("agent", "pass", "hil"), BoardCheck("program", "fail", "wrong outputs", "report a bug")]
    monkeypatch.setattr("hil.controller.workloads.board_checks.check_board", lambda *_, **__: iter(found))
    assert states(checks.check_simulator()) == {"simulator": ("fail", "program: wrong outputs", "report a bug")}
