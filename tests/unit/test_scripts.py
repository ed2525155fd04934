"""The scripts of a checkout, as far as they work without an environment."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
LINT = ROOT / "scripts" / "lint"
TEST = ROOT / "scripts" / "test"
FRAMEWORKS = sorted(one.name for one in (ROOT / "tests" / "frameworks").iterdir() if any(one.glob("test_*.py")))


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_lint_help_lists_every_check(option):
    helped = subprocess.run([LINT, option], capture_output=True, text=True, check=True)
    (loop,) = re.findall(r"^for check in (.*); do$", LINT.read_text(), re.M)
    for check in re.findall(r"'([^']+)'|(\S+)", loop):
        assert f"\n  {''.join(check).removeprefix('python ')} " in helped.stdout
    assert "does not run tests" in helped.stdout and helped.stderr == ""


def test_lint_rejects_arguments_before_setup():
    wrong = subprocess.run([LINT, "hil/cache.py"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "unexpected arguments: hil/cache.py" in wrong.stderr


@pytest.mark.parametrize("arguments", [["--framework"], ["--framework", "nothing"], ["--framework", "../unit"]])
def test_script_rejects_unknown_framework_before_setup(arguments):
    wrong = subprocess.run([TEST, *arguments], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert all(name in wrong.stderr for name in ["unknown framework", *FRAMEWORKS])


def test_script_extras_cover_every_framework():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    cases = re.findall(r"^    ([\w |-]+)\) echo ([\w,]+) ;;$", TEST.read_text(), re.M)
    found = {name: needed.split(",") for names, needed in cases for name in names.split(" | ")}
    assert FRAMEWORKS
    for name in FRAMEWORKS:
        assert set(found[name]) <= set(extras)


def test_checkout_installs_extras_that_guide_promises():
    (extras,) = re.findall(r"^command_extras=(\S+)$", (ROOT / "scripts" / "_setup").read_text(), re.M)
    web = (ROOT / "docs" / "web.md").read_text()
    (needed,) = re.findall(r"pip install 'hil\[([\w,]+)\]'", web)
    assert "`scripts/hil` in a checkout includes all" in web
    assert set(needed.split(",")) <= set(extras.split(","))


def test_pytest_testpaths_exclude_frameworks():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    folders = {f"tests/{one.name}" for one in (ROOT / "tests").iterdir() if any(one.rglob("test_*.py"))}
    assert folders - set(settings["testpaths"]) == {"tests/frameworks"}
