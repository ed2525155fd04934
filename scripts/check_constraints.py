"""Asks pip's own resolver for every extra on every Python that hil is for. Called by scripts/check-constraints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pythons() -> list[str]:
    return re.findall(r"Python :: (3\.\d+)\b", "\n".join(project()["classifiers"]))


def find_python(version: str) -> str | None:
    """The path of a Python of that version: one on PATH, of pyenv's, or else one that uv brings."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    path = [os.environ["PATH"], *map(str, pyenv.glob("versions/*/bin"))]

    def uv(*words: str) -> subprocess.CompletedProcess[str]:
        command = [Path(sys.executable).with_name("uv"), "python", *words, version]
        return subprocess.run(
            command, env={**os.environ, "PATH": os.pathsep.join(path)}, capture_output=True, text=True
        )

    found = uv("find", "--system", "--no-project")
    if found.returncode and uv("install").returncode == 0:
        found = uv("find", "--system", "--no-project")
    return found.stdout.strip() if found.returncode == 0 else None


def check(python: str, extra: str) -> tuple[bool, str]:
    """Whether pip would install this extra there, and how many packages that is, or why not."""
    words = ["install", "--dry-run", "--ignore-installed", "--quiet", "--no-input", "--disable-pip-version-check"]
    wanted = ["--report", "-", "-c", "constraints.txt", "-e", f".[{extra}]"]
    command = [sys.executable, "-m", "pip", "--python", python, *words, *wanted]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return False, "\n".join(f"    {line}" for line in done.stderr.splitlines() if not line.startswith("WARNING"))
    return True, f"{len(json.loads(done.stdout)['install'])} packages"


def check_all() -> Iterator[tuple[bool, str]]:
    """Yield for every Python and every extra whether it can be installed, and a line that says so."""
    extras = list(project()["optional-dependencies"])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for version in pythons():
            python = find_python(version)
            if python is None:
                yield False, f"{version}  NOT CHECKED: Python not found, and uv cannot install it"
                continue
            for extra, (good, told) in zip(extras, pool.map(check, repeat(python), extras), strict=True):
                yield good, f"{version}  {extra:<12}{told}" if good else f"{version}  {extra:<12}FAILED\n{told}"


def main() -> int:
    all_good = True
    for good, line in check_all():
        print(line, flush=True)
        all_good &= good
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
