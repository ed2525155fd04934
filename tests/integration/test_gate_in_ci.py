"""The GitHub action and the GitLab job for `hil gate`, on a pull request that breaks a model."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from onnx import TensorProto, helper
from support.models import save_model

ROOT = Path(__file__).parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
GITLAB: dict[str, Any] = yaml.safe_load((ROOT / "examples/ci/gitlab.yml").read_text())[".hil-gate"]
MEASURE = (
    "hil bench model.onnx --runtime-hw-type sim --runtime onnxruntime --min-time 0.05 --input x=x.npy --expected y.npy"
)
# Records its arguments and the file that it sends.
RECORDER = """#!/bin/sh
printf '%s\\n' "$@" >> "$RECORDED/arguments"
case "$*" in
*--paginate*) cat "$RECORDED/comments" ;;
*) cp hil-gate-comment.md "$RECORDED/comment.md" 2>/dev/null || cp hil-gate.md "$RECORDED/comment.md" ;;
esac
"""


def save_addition(path: Path, summand: float) -> None:
    """Save y = x + summand, 4 float32."""
    constant = helper.make_tensor("c", TensorProto.FLOAT, [4], [summand] * 4)
    nodes = [helper.make_node("Constant", [], ["c"], value=constant), helper.make_node("Add", ["x", "c"], ["y"])]
    value = (TensorProto.FLOAT, [4])
    save_model(path, nodes, [("x", *value)], [("y", *value)])


class Runner:
    """Working directory and environment of a CI job."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder / "checkout"
        self.recorded = folder / "recorded"
        for made in (self.folder, self.recorded, folder / "bin"):
            made.mkdir()
        (self.recorded / "comments").touch()
        hil = f'#!/bin/sh\nexec "{sys.executable}" -m hil.controller.cli.main "$@"\n'
        for name, text in {"hil": hil, "gh": RECORDER, "curl": RECORDER}.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        self.environment = {
            **environment,
            "PATH": f"{folder}/bin:{environment['PATH']}",
            "RECORDED": str(self.recorded),
            "COLUMNS": "200",
        }

    def run(self, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-eo", "pipefail", "-c", command],
            cwd=self.folder,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
        )

    def check(self, command: str) -> None:
        done = self.run(command)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def runner(tmp_path: Path, environment: dict[str, str]) -> Runner:
    """A checkout of a pull request that breaks the model of `main`."""
    made = Runner(tmp_path, environment)
    (made.folder / "hil.toml").write_text("[history]\nauto = true\n")
    (made.folder / ".gitignore").write_text("hil-runs/\nhil-gate.*\n")
    np.save(made.folder / "x.npy", np.zeros(4, np.float32))
    np.save(made.folder / "y.npy", np.ones(4, np.float32))
    save_addition(made.folder / "model.onnx", 1)
    made.check("git init -q -b main && git config user.name a && git config user.email a@example.com")
    made.check(f"git add -A && git commit -qm right && {MEASURE}")
    made.check("git checkout -qb pr")
    save_addition(made.folder / "model.onnx", 2)
    made.check("git commit -qam wrong")
    return made


def fill_in(text: str, values: Mapping[str, str]) -> str:
    """Replace expressions by values, as the runner does."""
    return re.sub(r"\$\{\{ *([\w.-]+) *\}\}", lambda found: values[found[1]], text)


def run_action(runner: Runner, measure: str) -> tuple[list[subprocess.CompletedProcess[str]], str]:
    """Run the action's steps, except the installation. Return the ended steps and the summary."""
    output, summary = runner.recorded / "output", runner.recorded / "summary"
    values = {f"inputs.{name}": str(one.get("default", "")) for name, one in ACTION["inputs"].items()}
    values |= {
        "inputs.measure": measure,
        "inputs.token": "secret",
        "inputs.name": "gate",
        "github.event.pull_request.number": "17",
    }
    done = []
    for step in ACTION["runs"]["steps"][1:]:
        variables = {name: fill_in(text, values) for name, text in step.get("env", {}).items()}
        files = {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_ACTIONS": "true"}
        files["GITHUB_REPOSITORY"] = "ada/models"
        done.append(runner.run(step["run"], **variables, **files))
        if step.get("id") == "gate":
            name, _, value = output.read_text().strip().partition("=")
            values[f"steps.gate.outputs.{name}"] = value
    return done, summary.read_text() if summary.exists() else ""


def test_action_fails_comments_and_annotates_broken_model(runner: Runner) -> None:
    (measured, gate, comment, result), summary = run_action(runner, MEASURE)
    assert (measured.returncode, gate.returncode, comment.returncode) == (0, 0, 0), gate.stderr + comment.stderr
    assert result.returncode == 1, gate.stdout + gate.stderr
    assert "a measurement failed with 1" in measured.stdout
    *_, method, address, _, body = (runner.recorded / "arguments").read_text().split()
    assert (method, address, body) == ("POST", "repos/ada/models/issues/17/comments", "body=@hil-gate-comment.md")
    posted = (runner.recorded / "comment.md").read_text()
    assert posted == f"<!-- hil gate: gate -->\n{summary}"
    assert "**broken**" in posted
    (annotation,) = [line for line in gate.stdout.splitlines() if line.startswith("::error")]
    assert annotation.startswith("::error file=model.onnx,title=hil gate%3A broken::model on sim onnxruntime: FAIL")


def test_action_passes_unchanged_model(runner: Runner) -> None:
    save_addition(runner.folder / "model.onnx", 1)
    runner.check("git commit -qam right")
    steps, summary = run_action(runner, MEASURE)
    assert [one.returncode for one in steps] == [0, 0, 0, 0]
    assert summary.startswith("### hil gate: passed\n")
    assert "::" not in steps[1].stdout


def test_action_replaces_its_comment(runner: Runner) -> None:
    (runner.recorded / "comments").write_text("41\n42\n")
    run_action(runner, MEASURE)
    *_, method, address, _, _ = (runner.recorded / "arguments").read_text().split()
    assert (method, address) == ("PATCH", "repos/ada/models/issues/comments/42")


def test_action_scripts_contain_no_expressions() -> None:
    """An expression would insert text from outside into the script."""
    assert not [step["name"] for step in ACTION["runs"]["steps"] if "${{" in step["run"]]


def test_gitlab_job_fails_and_comments_broken_model(runner: Runner) -> None:
    variables = {name: text.replace("$CI_DEFAULT_BRANCH", "main") for name, text in GITLAB["variables"].items()}
    variables |= {"HIL_MEASURE": MEASURE, "HIL_GITLAB_TOKEN": "secret", "CI_MERGE_REQUEST_IID": "5"}
    done = runner.run("\n".join(GITLAB["script"]), CI_API_V4_URL="https://example.com", CI_PROJECT_ID="1", **variables)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "https://example.com/projects/1/merge_requests/5/notes" in (runner.recorded / "arguments").read_text()
    assert "**broken**" in (runner.recorded / "comment.md").read_text()
    assert (runner.folder / GITLAB["artifacts"]["reports"]["junit"]).is_file()
