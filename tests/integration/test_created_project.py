"""A project that `hil init` creates works: `hil run`, the created tests, and the commands of the CI file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import Ended
from support.workflows import list_commands

ROOT = Path(__file__).parents[2]
COMMANDS = {"hil": "hil.controller.cli.main", "pytest": "pytest"}


@pytest.fixture
def project(tmp_path: Path, hil: Callable[..., Ended]) -> Path:
    done = hil("init", "net", "--yes")
    assert done.code == 0, done.err
    return tmp_path / "net"


@pytest.fixture
def shell(tmp_path: Path, sharing_environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of a shell with `hil` and `pytest`, without the settings of this pytest."""
    (tmp_path / "bin").mkdir()
    for name, module in COMMANDS.items():
        script = tmp_path / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        script.chmod(0o755)
    clean = {name: value for name, value in sharing_environment.items() if not name.startswith(("PYTEST", "COLUMNS"))}
    return {**clean, "PATH": f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"}


def run_ci(project: Path, shell: Mapping[str, str], **variables: str) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run the commands of the workflow as the runner does, except the installation."""
    flow: dict[Any, Any] = yaml.safe_load((project / ".github/workflows/models.yml").read_text())
    (job,) = flow["jobs"].values()
    environment = {**shell, **job["env"], **variables}
    (_, install), *commands = list_commands(flow)
    assert install == 'python -m pip install "$HIL_PACKAGE"'
    return {
        command: subprocess.run(
            ["bash", "-eo", "pipefail", "-c", command], cwd=project, env=environment, capture_output=True, text=True
        )
        for _, command in commands
    }


@pytest.mark.daily
def test_hil_run_uses_created_project_file(project: Path, hil: Callable[..., Ended]) -> None:
    done = hil("run", "models/digits_cnn.onnx", "--json", cwd=project)
    assert done.code == 0, done.err
    assert f'{project}/hil.toml: board, models."digits_cnn.onnx"' in done.err
    assert done.document["request"]["board"] == "sim"
    assert done.case["device"]["iterations"] == 10


def test_created_ci_file_passes(project: Path, shell: dict[str, str]) -> None:
    done = run_ci(project, shell)
    assert {command: one.returncode for command, one in done.items()} == {
        "hil doctor": 0,
        "pytest --hil-out=hil-reports": 0,
    }, [one.stdout + one.stderr for one in done.values()]
    tests = done["pytest --hil-out=hil-reports"].stdout
    assert "tests/test_models.py .." in tests and "models/digits_cnn.onnx ........." in tests
    assert (project / "hil-reports/models/sim/junit.xml").is_file()


def test_created_ci_file_passes_with_models_of_two_formats(
    tmp_path: Path, shell: dict[str, str], hil: Callable[..., Ended]
) -> None:
    (tmp_path / "net/models").mkdir(parents=True)
    for name in ("digits/digits_cnn.onnx", "tflite/digits.tflite"):
        shutil.copy(ROOT / "examples" / name, tmp_path / "net/models")
    assert hil("init", "--yes", cwd=tmp_path / "net").code == 0
    assert "hil[pytest,tflite]" in (tmp_path / "net/.github/workflows/models.yml").read_text()
    done = run_ci(tmp_path / "net", shell)["pytest --hil-out=hil-reports"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hil: flow iree, tflite on sim" in done.stdout


@pytest.mark.slow
def test_created_ci_file_fails_on_wrong_outputs(project: Path, shell: dict[str, str]) -> None:
    done = run_ci(project, shell, HIL_BOARD="sim-undeclared")["pytest --hil-out=hil-reports"]
    assert done.returncode == 1
    assert "FAILED tests/test_models.py::test_outputs_match_the_reference" in done.stdout


def test_pytest_uses_board_of_project_file(project: Path, shell: dict[str, str]) -> None:
    def collect(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "--hil-no-layers", *words]
        return subprocess.run(command, cwd=project, env=shell, capture_output=True, text=True)

    file = project / "hil.toml"
    file.write_text('[defaults]\nboard = "sim-f16"\nflow = "onnxruntime"\n')
    done = collect()
    assert "hil: flow onnxruntime on sim-f16\n" in done.stdout, done.stdout + done.stderr
    assert "digits_cnn_full_model-sim-f16>" in done.stdout
    assert "digits_cnn_full_model-sim>" in collect("--runtime-hw-type=sim").stdout
    file.write_text('[defaults]\nboard = "root@rpi5"\n')
    done = collect()
    assert done.returncode == 4 and "need trust: [defaults] board" in done.stderr
