"""Workflows and shell scripts of the repository. The lint job of ci.yml also runs actionlint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from support.workflows import find_violations, list_commands, list_uses, needs_shellcheck, shellcheck

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS: dict[str, dict[Any, Any]] = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))
}
JOBS = {f"{name}/{job}": body for name, flow in WORKFLOWS.items() for job, body in flow["jobs"].items()}
COMMANDS = [(f"{name}/{job}", command) for name, flow in WORKFLOWS.items() for job, command in list_commands(flow)]
SCRIPTS = [
    path
    for path in sorted([*(ROOT / "scripts").iterdir(), ROOT / ".ci/run"])
    if path.is_file() and re.match(rb"#!.*\b(ba)?sh\n", path.read_bytes())
]


@pytest.mark.ci
@needs_shellcheck
def test_shell_scripts_pass_shellcheck() -> None:
    assert len(SCRIPTS) > 15
    assert shellcheck(*SCRIPTS) == ""


@needs_shellcheck
def test_shell_scripts_for_boards_pass_shellcheck() -> None:
    scripts = sorted((ROOT / "hil").rglob("*.sh"))
    assert len(scripts) > 5
    assert shellcheck("--shell=sh", *scripts) == ""


@needs_shellcheck
def test_sourced_setup_passes_shellcheck() -> None:
    # The script that sources it sets `root`.
    assert shellcheck("--shell=sh", "--exclude=SC2154", ROOT / "scripts/_setup") == ""


@needs_shellcheck
@pytest.mark.parametrize("job, command", COMMANDS)
def test_workflow_commands_pass_shellcheck(job: str, command: str) -> None:
    assert shellcheck("--shell=bash", "-", script=command) == "", job


def test_workflow_commands_use_existing_scripts() -> None:
    named = {name for _, command in COMMANDS for name in re.findall(r"\b(?:scripts|tools)/[\w.-]+", command)}
    assert {"scripts/lint", "scripts/test", "scripts/docs", "scripts/release"} <= named
    assert {name for name in named if not os.access(ROOT / name, os.X_OK)} == set()


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_follow_rules(name: str) -> None:
    assert list(find_violations(WORKFLOWS[name])) == []


def test_only_publishing_jobs_have_more_permissions() -> None:
    assert {job: body["permissions"] for job, body in JOBS.items() if "permissions" in body} == {
        "docs/deploy": {"pages": "write", "id-token": "write"},
        "release/github": {"contents": "write"},
        "release/pypi": {"id-token": "write"},
    }


def test_workflow_actions_have_one_version() -> None:
    names = [one.partition("@")[0] for one in {one for flow in WORKFLOWS.values() for one in list_uses(flow)}]
    assert sorted(names) == sorted(set(names))


def test_ci_tests_every_supported_python() -> None:
    supported = SpecifierSet(PROJECT["requires-python"])
    tested = JOBS["ci/tests"]["strategy"]["matrix"]["python"]
    assert tested == [version for version in (f"3.{minor}" for minor in range(30)) if version in supported]


def check_release(tmp_path: Path, tag: str, heading: str) -> subprocess.CompletedProcess[str]:
    """Run the first command of release.yml."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        f"# Changelog\n\n{heading}\n\nNew.\n\n### Fixed\n\n- Bug.\n\n## [1.1.0]\n\nOld.\n"
    )
    (tmp_path / "bin").mkdir(exist_ok=True)
    python = tmp_path / "bin/python"
    python.unlink(missing_ok=True)
    python.symlink_to(sys.executable)
    environment = {"TAG": tag, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    command = next(command for job, command in COMMANDS if job == "release/build")
    return subprocess.run(["bash", "-e", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="release.yml uses Python 3.11")
def test_release_notes_are_section_of_version(tmp_path: Path) -> None:
    assert check_release(tmp_path, "v1.2.0", "## [1.2.0] - 2026-12-01").returncode == 0
    assert (tmp_path / "notes.md").read_text().strip() == "New.\n\n### Fixed\n\n- Bug."


@pytest.mark.skipif(sys.version_info < (3, 11), reason="release.yml uses Python 3.11")
def test_release_rejects_other_tag_or_missing_notes(tmp_path: Path) -> None:
    wrong = check_release(tmp_path, "v1.3.0", "## [1.2.0]")
    assert wrong.returncode == 1 and "tag 'v1.3.0' does not match version '1.2.0'" in wrong.stdout
    missing = check_release(tmp_path, "v1.2.0", "## [Unreleased]")
    assert missing.returncode == 1 and "'## [1.2.0]' missing or empty" in missing.stdout


def test_pre_commit_hooks_run_existing_programs() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    programs = {hook["entry"].split()[0] for hook in local["hooks"]}
    assert programs == {".venv/bin/ruff", "tools/check_commit.py"}
    assert os.access(ROOT / "tools/check_commit.py", os.X_OK)


def test_issue_forms_have_unique_fields() -> None:
    forms = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 3
    for form in forms:
        content = yaml.safe_load(form.read_text())
        fields = [field["id"] for field in content["body"] if field["type"] != "markdown"]
        assert content["name"] and content["description"] and fields
        assert sorted(fields) == sorted(set(fields)), form.name
