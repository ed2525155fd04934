"""The scripts of a checkout, as far as they do something without an environment of their own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

LINT = Path(__file__).parents[2] / "scripts" / "lint"


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_lint_says_what_it_runs_and_what_it_does_not(option):
    helped = subprocess.run([LINT, option], capture_output=True, text=True, check=True)
    (loop,) = re.findall(r"^for check in (.*); do$", LINT.read_text(), re.M)
    for check in re.findall(r"'([^']+)'|(\S+)", loop):
        assert f"\n  {''.join(check)} " in helped.stdout
    assert "does not run tests" in helped.stdout and helped.stderr == ""


def test_lint_refuses_arguments_before_it_sets_anything_up():
    wrong = subprocess.run([LINT, "hil/cache.py"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "takes no arguments: hil/cache.py" in wrong.stderr
