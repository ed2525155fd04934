"""Checks of commit messages, alone and as a hook of a real repository."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.check_commit import MAX_LENGTH, find_errors, read_message

ROOT = Path(__file__).parents[3]
WHO = {f"GIT_{role}_{key}": "a@b.test" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
# Without settings of the user, or of a git command that runs the tests.
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
    **WHO,
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)


def commit(repository: Path, *messages: str) -> subprocess.CompletedProcess[str]:
    paragraphs = [word for message in messages for word in ("-m", message)]
    return run("git", "commit", "--quiet", "--allow-empty", *paragraphs, cwd=repository)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for name in ("tools/check_commit.py", "scripts/install-hooks"):
        (root / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, root / name)
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "Initial commit"]):
        assert run("git", *command, cwd=root).returncode == 0
    return root


@pytest.fixture
def hooked(repository: Path) -> Path:
    assert run("scripts/install-hooks", cwd=repository).returncode == 0
    return repository


@pytest.mark.parametrize(
    "message",
    [
        "agent: free admission slot before closing the stream",
        "docs/web: add a table\n\nReason.\n",
        "sim-f16: x",
        "a: " + "b" * (MAX_LENGTH - 3),
        "Merge branch 'main' into other",
        'Revert "Broken."',
        "fixup! Anything.",
    ],
)
def test_check_commit_accepts_valid_message(message: str) -> None:
    assert find_errors(message) == []


@pytest.mark.parametrize(
    "message, rule",
    [
        ("Add a table", "'area: summary'"),
        ("Docs: add a table", "'area: summary'"),
        ("docs, web: add a table", "'area: summary'"),
        ("docs:add a table", "'area: summary'"),
        ("docs: ", "'area: summary'"),
        ("docs: Add a table", "lower-case word"),
        ("docs: addTable", "lower-case word"),
        ("docs: 2 tables", "lower-case word"),
        ("docs: add a table.", "full stop"),
        ("a: " + "b" * (MAX_LENGTH - 2), "73 characters"),
        ("docs: add a table\nReason.", "second line"),
        ("Mergers: add", "'area: summary'"),
    ],
)
def test_check_commit_names_broken_rule(message: str, rule: str) -> None:
    (error,) = find_errors(message)
    assert rule in error


def test_check_commit_ignores_comments_of_git(tmp_path: Path) -> None:
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text("\n# Please enter\ndocs: add é\n# On branch\n\n# ----- >8 -----\n# Below\ndiff --git a b\n")
    assert read_message(file).split("\n") == ["", "docs: add é", ""]
    assert find_errors(read_message(file)) == []


def test_hook_rejects_bad_subject_only(hooked: Path) -> None:
    rejected = commit(hooked, "Add a table.")
    assert rejected.returncode != 0
    for text in ("Add a table.", "'area: summary'", "full stop", "example: agent: "):
        assert text in rejected.stderr
    assert commit(hooked, "docs: add a table", "Reason.").returncode == 0
    subjects = run("git", "log", "--format=%s", cwd=hooked).stdout.split("\n")
    assert subjects[:2] == ["docs: add a table", "Initial commit"]


def test_hook_checks_commits_in_worktrees(hooked: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    assert run("git", "worktree", "add", "--quiet", tree, cwd=hooked).returncode == 0
    assert run("scripts/install-hooks", cwd=tree).returncode == 0
    assert commit(tree, "Add a table").returncode != 0
    # An old commit without the check.
    assert run("git", "rm", "--quiet", "tools/check_commit.py", cwd=tree).returncode == 0
    assert commit(tree, "Add a table").returncode == 0


def test_install_hooks_keeps_foreign_hook(repository: Path) -> None:
    hook = repository / ".git/hooks/commit-msg"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\n")
    refused = run("scripts/install-hooks", cwd=repository)
    assert refused.returncode == 2 and "commit-msg exists" in refused.stderr
    assert hook.read_text() == "#!/bin/sh\n"


def test_range_reports_only_invalid_commits(repository: Path) -> None:
    for subject in ("docs: add a table", "Fix it", "fixup! Fix it"):
        assert commit(repository, subject).returncode == 0
    checked = run("tools/check_commit.py", "--range", "HEAD~3..HEAD", cwd=repository)
    name = run("git", "rev-parse", "--short", "HEAD~1", cwd=repository).stdout.strip()
    assert checked.returncode == 1
    assert [line for line in checked.stderr.splitlines() if line[0] != " "] == [
        f"invalid commit message {name}: Fix it"
    ]
    assert run("tools/check_commit.py", "--range", "HEAD~1..HEAD", cwd=repository).returncode == 0
    assert run("tools/check_commit.py", "--range", "HEAD~1..missing", cwd=repository).returncode == 2
