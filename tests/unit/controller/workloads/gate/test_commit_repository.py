"""Temporary worktrees of a git repository, and builds in them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hil.controller.workloads.gate.bisection.repository import CommitTree, GitRepository
from hil.controller.workloads.gate.bisection.shell import run_command
from hil.errors import UsageError

Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path) -> Git:
    root = tmp_path / "repository"
    root.mkdir()

    def call(*args: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        return subprocess.check_output(["git", *identity, *args], cwd=root, text=True, stderr=subprocess.PIPE)

    call("init", "-q", "-b", "main")
    (root / "m.onnx").write_text("0")
    call("add", "-A")
    call("commit", "-qm", "commit 0")
    return call


@pytest.fixture
def repository(git: Git, tmp_path: Path) -> GitRepository:
    return GitRepository.find(tmp_path / "repository")


def commit(git: Git, repository: GitRepository, name: str = "m.onnx") -> str:
    count = git("rev-list", "--count", "HEAD").strip()
    (repository.root / name).write_text(count)
    git("add", "-A")
    git("commit", "-qm", f"commit {count}")
    return git("rev-parse", "HEAD").strip()


def test_find_needs_repository(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="git rev-parse failed"):
        GitRepository.find(tmp_path)


def test_list_commits_starts_with_good_commit(git: Git, repository: GitRepository) -> None:
    good = git("rev-parse", "HEAD").strip()
    bad = [commit(git, repository), commit(git, repository)][-1]
    found = repository.list_commits(good[:8], bad)
    assert [one.subject for one in found] == ["commit 0", "commit 1", "commit 2"]
    assert (found[0].commit, found[-1].commit) == (good, bad)


def test_list_commits_starts_where_branches_separate(git: Git, repository: GitRepository) -> None:
    base = git("rev-parse", "HEAD").strip()
    good = commit(git, repository)
    git("checkout", "-qb", "pr", base)
    bad = commit(git, repository, "other")
    assert [one.commit for one in repository.list_commits(good, bad)] == [base, bad]


@pytest.mark.parametrize("bad", ["--output=stolen", "feed" * 10, "", "HEAD~9", "-h"])
def test_list_commits_refuses_unknown_commit(bad: str, repository: GitRepository) -> None:
    with pytest.raises(UsageError, match="is not in"):
        repository.list_commits("HEAD", bad)
    assert [path.name for path in repository.root.iterdir() if path.name != ".git"] == ["m.onnx"]


def test_list_commits_refuses_range_without_commits(git: Git, repository: GitRepository) -> None:
    commit(git, repository)
    with pytest.raises(UsageError, match="no commits to search"):
        repository.list_commits("HEAD", "HEAD~1")


def test_worktree_is_removed_after_interrupt(git: Git, repository: GitRepository) -> None:
    (repository.root / "m.onnx").write_text("uncommitted")
    with pytest.raises(KeyboardInterrupt), repository.open_worktree() as tree:
        tree.check_out("HEAD")
        assert (tree.folder / "m.onnx").read_text() == "0"
        raise KeyboardInterrupt
    assert not tree.folder.exists()
    assert len(git("worktree", "list").splitlines()) == 1
    assert (repository.root / "m.onnx").read_text() == "uncommitted"


def test_check_out_removes_files_of_earlier_builds(git: Git, repository: GitRepository) -> None:
    commits = [git("rev-parse", "HEAD").strip(), commit(git, repository)]
    with repository.open_worktree() as tree:
        tree.check_out(commits[0])
        (tree.folder / "built").write_text("")
        (tree.folder / "m.onnx").write_text("changed")
        tree.check_out(commits[1])
        assert [path.name for path in tree.folder.iterdir() if path.name != ".git"] == ["m.onnx"]
        assert (tree.folder / "m.onnx").read_text() == "1"


@pytest.mark.parametrize("commit", ["--lock", "--no-checkout", "", "0" * 40])
def test_check_out_refuses_options_and_unknown_commits(repository: GitRepository, commit: str) -> None:
    """The commit is a text from the history."""
    with repository.open_worktree() as tree:
        with pytest.raises(UsageError, match="is not in"):
            tree.check_out(commit)
        tree.check_out("HEAD")
        with pytest.raises(UsageError, match="is not in"):
            tree.check_out(commit)


def test_check_out_runs_no_hooks(repository: GitRepository, tmp_path: Path) -> None:
    hook = repository.root / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    with repository.open_worktree() as tree:
        tree.check_out("HEAD")
    assert not (tmp_path / "ran").exists()


def test_export_file_writes_file_of_commit(git: Git, repository: GitRepository, tmp_path: Path) -> None:
    first = git("rev-parse", "HEAD").strip()
    commit(git, repository)
    assert repository.export_file(first[:8], "m.onnx", tmp_path).read_text() == "0"
    for name in ("missing.onnx", "../m.onnx", "/etc/passwd"):
        with pytest.raises(UsageError, match="git cat-file failed"):
            repository.export_file(first, name, tmp_path)


def build(tree: CommitTree, command: str, log: Path, timeout_s: float = 60) -> str:
    tree.check_out("HEAD")
    variables = {"HIL_COMMIT": "1234"}
    return run_command(command, tree.folder, variables, title="the build", timeout_s=timeout_s, log=log)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("test $HIL_COMMIT = 1234 && test -f m.onnx", ""),
        ("echo no compiler; exit 3", "the build ended with exit code 3: no compiler; see"),
        ("kill -9 $$", "the build was killed by SIGKILL; see"),
    ],
)
def test_build_reports_failure(command: str, reason: str, repository: GitRepository, tmp_path: Path) -> None:
    with repository.open_worktree() as tree:
        found = build(tree, command, tmp_path / "log")
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_build_is_stopped_with_its_processes(repository: GitRepository, tmp_path: Path) -> None:
    with repository.open_worktree() as tree:
        found = build(tree, f"(sleep 1; touch {tmp_path}/late) & sleep 60", tmp_path / "log", timeout_s=0.2)
    assert "exceeded 0.2 s" in found
    assert not (tmp_path / "late").exists()


@pytest.mark.parametrize("name", ["/etc/passwd", "../repository/m.onnx", "missing.onnx"])
def test_find_model_refuses_paths_outside_of_commit(name: str, repository: GitRepository) -> None:
    with repository.open_worktree() as tree:
        tree.check_out("HEAD")
        assert tree.find_model("m.onnx") == tree.folder / "m.onnx"
        with pytest.raises(UsageError, match="is missing in the commit"):
            tree.find_model(name)


def test_locate_tensor_prefers_files_of_commit(git: Git, repository: GitRepository, tmp_path: Path) -> None:
    commit(git, repository, "y.npy")
    (repository.root / "untracked.npz").write_text("")
    (tmp_path / "outside.npy").write_text("")
    with repository.open_worktree() as tree:
        tree.check_out("HEAD")
        assert tree.locate_tensor("y=y.npy") == f"y={tree.folder}/y.npy"
        assert tree.locate_tensor("4xf32=@y.npy") == f"4xf32=@{tree.folder}/y.npy"
        assert tree.locate_tensor("x=untracked.npz:key") == f"x={repository.root}/untracked.npz:key"
        assert tree.locate_tensor("../outside.npy") == f"{tmp_path}/outside.npy"
        assert tree.locate_tensor("4xf32=1 2 3 4") == "4xf32=1 2 3 4"
        tree.check_out("HEAD~1")
        with pytest.raises(UsageError, match=r"y\.npy is missing in the commit"):
            tree.locate_tensor("y.npy")
