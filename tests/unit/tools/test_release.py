"""scripts/release: checks before a release, and reproducible archives."""

from __future__ import annotations

import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools import release
from tools.release import ReleaseError

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "tiny"
version = "1.2.3"
requires-python = ">=3.10"
[tool.hatch.build.targets.wheel]
packages = ["tiny"]
"""


def commit(root: Path) -> None:
    git = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@t.example"]
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "tests: change files"], check=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "tiny").mkdir(parents=True)
    (root / "tiny/__init__.py").write_text("VALUE = 1\n")
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.3]\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    commit(root)
    return root


def write_wheel(path: Path, **files: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(zipfile.ZipInfo(name), text)
    return path


def test_release_requires_changelog_section(project: Path):
    assert release.read_version(project) == "1.2.3"
    (project / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.33]\n")
    with pytest.raises(ReleaseError, match=r"no section for version 1\.2\.3"):
        release.read_version(project)


def test_release_rejects_uncommitted_changes(project: Path):
    (project / "untracked.txt").write_text("ignored")
    release.check_clean(project)
    (project / "tiny/__init__.py").write_text("VALUE = 2\n")
    with pytest.raises(ReleaseError, match=r"commit or discard the changes first: tiny/__init__\.py"):
        release.check_clean(project)


def test_different_builds_name_the_file(tmp_path: Path):
    one = write_wheel(tmp_path / "a/x.whl", same="1", other="1")
    two = write_wheel(tmp_path / "b/x.whl", same="1", other="2")
    release.check_same([one], [one])
    with pytest.raises(ReleaseError, match=r"two builds of x\.whl differ: other"):
        release.check_same([one], [two])
    with pytest.raises(ReleaseError, match="different files"):
        release.check_same([one], [])


def test_bare_environment_hides_settings_but_keeps_pip_config(tmp_path: Path):
    config = tmp_path / ".config/pip/pip.conf"
    config.parent.mkdir(parents=True)
    config.touch()
    outer = {"HOME": str(tmp_path), "PATH": "/bin", "HIL_BOARD": "rpi5", "PYTHONPATH": "x", "VIRTUAL_ENV": "y"}
    bare = release.make_bare_environment(outer, tmp_path / "home")
    assert bare == {"HOME": str(tmp_path / "home"), "PATH": "/bin", "PIP_CONFIG_FILE": str(config)}


@pytest.mark.ci
def test_builds_contain_committed_files_and_are_reproducible(project: Path, tmp_path: Path):
    (project / "tiny/uncommitted.py").write_text("")
    first = release.build_distributions(project, tmp_path / "first")
    second = release.build_distributions(project, tmp_path / "second")
    release.check_same(first, second)
    wheel, sdist = sorted(first, key=lambda path: path.suffix, reverse=True)
    assert (wheel.name, sdist.name) == ("tiny-1.2.3-py3-none-any.whl", "tiny-1.2.3.tar.gz")
    assert "tiny/__init__.py" in zipfile.ZipFile(wheel).namelist()
    assert "tiny/uncommitted.py" not in zipfile.ZipFile(wheel).namelist()
    with tarfile.open(sdist) as files:
        assert "tiny-1.2.3/tiny/__init__.py" in files.getnames()


def test_tools_run_example_in_bare_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, dict[str, str]]] = []

    def run(command: list[str], env: dict[str, str], cwd: Path | None = None) -> str:
        calls.append((" ".join(command[1:]), dict(env)))
        return "/cache\n" if command[1] == "cache" else "PASS  digits_cnn  iree\n"

    monkeypatch.setenv("HIL_BOARD", "rpi5")
    monkeypatch.setattr(release, "_run", run)
    release.check_tools("/opt/python3.12", tmp_path / "hil.whl")
    uvx, pipx = [one for one in calls if "hil run example:digits_cnn" in one[0]]
    assert f"--python /opt/python3.12 --constraints {release.ROOT}/constraints.txt --from {tmp_path}/hil.whl" in uvx[0]
    assert "pipx run --python /opt/python3.12" in pipx[0] and f"--spec {tmp_path}/hil.whl" in pipx[0]
    assert all("HIL_BOARD" not in env and env["UV_CACHE_DIR"] == "/cache" for _, env in (uvx, pipx))


@pytest.mark.parametrize("tool", ["uvx", "pipx"])
def test_failing_run_of_tool_ends_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str):
    def run(command: list[str], env: dict[str, str], cwd: Path | None = None) -> str:
        return "FAIL  digits_cnn\n" if ("pipx" in command) == (tool == "pipx") else "PASS  digits_cnn\n"

    monkeypatch.setattr(release, "_run", run)
    with pytest.raises(ReleaseError, match=rf"hil run did not pass with {tool}:\nFAIL"):
        release.check_tools("python3.12", tmp_path / "hil.whl")
