"""Rules for workflows of GitHub, and shellcheck."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHELLCHECK = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
needs_shellcheck = pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck has no wheel for this platform")


def shellcheck(*arguments: str | Path, script: str = "") -> str:
    """Return the findings of shellcheck."""
    assert SHELLCHECK is not None
    done = subprocess.run([SHELLCHECK, *arguments], cwd=ROOT, input=script, capture_output=True, text=True)
    return done.stdout + done.stderr


def list_uses(flow: dict[Any, Any]) -> set[str]:
    """Return the actions that a workflow uses, with versions."""
    return {step["uses"] for job in flow["jobs"].values() for step in job["steps"] if "uses" in step}


def list_commands(flow: dict[Any, Any]) -> list[tuple[str, str]]:
    """Return (job, script) of each step with a script."""
    return [(name, step["run"]) for name, job in flow["jobs"].items() for step in job["steps"] if "run" in step]


def find_violations(flow: dict[Any, Any], max_minutes: int = 120) -> Iterator[str]:
    """Yield the rules that a workflow violates."""
    if flow.get("permissions") != {"contents": "read"}:
        yield "the workflow is not read-only by default"
    for name, job in flow["jobs"].items():
        if not 0 < job.get("timeout-minutes", 0) <= max_minutes:
            yield f"{name} has no timeout"
    for one in sorted(list_uses(flow)):
        if not re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", one):
            yield f"{one} has no major version"
    for name, command in list_commands(flow):
        # An expression would insert text from outside, such as the name of a branch, into the script.
        if "${{" in command:
            yield f"{name} has an expression in a script"
