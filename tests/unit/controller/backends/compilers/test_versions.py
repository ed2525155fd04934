"""Other versions of a compiler in hil's cache."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hil.controller.backends.compilers import versions
from hil.controller.storage.cache import Cache
from hil.errors import UsageError

# Replaces pip: installs version 1, and fails for other versions.
PIP = """
import pathlib, sys
target, requirement = sys.argv[-2].removeprefix("--target="), sys.argv[-1]
print("Collecting", requirement)
if not requirement.endswith("==1"):
    print("ERROR: No matching distribution found for", requirement)
    print("hint: x")
    sys.exit(1)
pathlib.Path(target, "compiler.py").write_text(requirement)
"""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []

    def command(module: str, *arguments: str) -> list[str]:
        found.append((module, *arguments))
        return [sys.executable, "-c", PIP]

    monkeypatch.setattr(versions, "make_module_command", command)
    return found


def test_compiler_is_installed_once(calls: list[tuple[str, ...]], tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    folders = [versions.install_compiler("some-compiler", "1", cache=cache, log=tmp_path / "log") for _ in range(2)]
    assert folders[0] == folders[1] and len(calls) == 1
    assert (folders[0] / "compiler.py").read_text() == "some-compiler==1"


def test_missing_version_names_error_of_pip(calls: list[tuple[str, ...]], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot install c 2: No matching distribution found for c==2") as raised:
        versions.install_compiler("c", "2", cache=Cache(tmp_path / "cache"), log=tmp_path / "log")
    assert raised.value.hint == f"see {tmp_path / 'log'}"
