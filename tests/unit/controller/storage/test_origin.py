"""Test the origin of records: labels and the git working tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from hil.controller.cli.main import cli
from hil.controller.pipeline.settings.options import Job
from hil.controller.pipeline.settings.repeat import run_command
from hil.controller.records.outputs import Origin
from hil.controller.storage.runs import RunStore
from hil.controller.storage.sources.origin import find_origin, find_request_origin, format_origin, use_origin
from hil.controller.workloads.matrix.job import Matrix
from hil.controller.workloads.matrix.targets import MatrixTarget
from hil.controller.workloads.suites.request import Settings, SuiteRequest
from hil.controller.workloads.traces.trace import Trace
from hil.core.results import Outcome


def git(folder: Path, *words: str) -> str:
    whose = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", *whose, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HIL_LABELS", "GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_BRANCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = tmp_path / "tree"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "spare/ä")
    git(folder, "commit", "-q", "--allow-empty", "-m", "one")
    monkeypatch.chdir(folder)
    return folder


def test_origin_includes_branch_commit_and_labels(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_LABELS", "nightly, ,b")
    commit = git(tree, "rev-parse", "HEAD")
    wanted = Origin(labels=["b", "a", "nightly"], branch="spare/ä", commit=commit)
    assert find_origin(["b", " a ", "", "b"]) == wanted
    assert RunStore(tree / "runs").create("x", {"labels": ["b", "a"]}).record.origin == wanted
    assert find_request_origin({"settings": {"labels": ["b", "a"]}}) == wanted
    assert format_origin(wanted) == f"b, a, nightly, spare/ä {commit[:9]}"


def test_origin_reads_ci_branch_for_detached_commit(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tree, "checkout", "-q", "--detach")
    assert find_origin().branch == ""
    for name in ("CI_COMMIT_BRANCH", "GITHUB_REF_NAME", "GITHUB_HEAD_REF"):
        monkeypatch.setenv(name, name.lower())
        assert find_origin().branch == name.lower()


def test_origin_stays_empty_without_git_commit(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Origin(labels=[], branch="", commit="")
    empty = tree / "empty"
    empty.mkdir()
    git(empty, "init", "-q")
    monkeypatch.chdir(empty)
    assert find_origin() == nothing
    monkeypatch.chdir(tree.parent)
    assert find_origin() == nothing
    monkeypatch.chdir(tree)
    monkeypatch.setenv("PATH", str(empty))
    assert find_origin() == nothing
    assert format_origin(nothing) == format_origin(None) == ""


def test_origin_of_farm_job_describes_submitter(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_LABELS", "host")
    submitter = Origin(labels=["a"], branch="main", commit="")
    with use_origin(submitter):
        assert find_origin(["b"]) == submitter


def test_all_records_include_origin(tree: Path) -> None:
    wanted = find_origin(["a"])
    targets = [MatrixTarget("x", {}), MatrixTarget("y", {})]
    assert Matrix.create(tree / "m", "run", "t", {"labels": ["a"]}, targets, "").head.origin == wanted
    folder = Trace("Module", "tf", "t").save(tree / "t")
    assert Trace.load(folder).origin == find_origin().to_json()
    # A trace that is saved again keeps its origin.
    git(tree, "checkout", "-q", "--orphan", "other")
    assert Trace.load(Trace.load(folder).save(tree / "u")).origin["branch"] == "spare/ä"


def test_labels_leave_commands_unchanged(tree: Path) -> None:
    one, other = (SuiteRequest("@models", settings=Settings(labels=labels)) for labels in ((), ("a",)))
    assert one.command("case") == other.command("case")
    assert run_command(Job((Path("m.onnx"),))) == run_command(Job((Path("m.onnx"),), labels=("a",)))


def test_runs_list_and_show_print_origin(tree: Path) -> None:
    run = RunStore(tree / "runs").create("m", {"labels": ["nightly"]})
    run.record = run.record.replace(outcome=Outcome.PASS, finished=True, exit_code=0)
    run.save()
    commit = git(tree, "rev-parse", "HEAD")[:9]
    for words in (["list"], ["show", "latest"]):
        found = CliRunner().invoke(cli, ["runs", *words, "--out", str(tree / "runs")])
        assert f"nightly, spare/ä {commit}" in found.output, found
