"""Compiler whose behaviour a test defines."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from hil.controller.storage.isolation.isolated import Isolated


def fake_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Isolated:
    """Return a pool with one worker. The worker finds this script instead of iree-compile; iree.compiler is otherwise
    unchanged.
    """
    package = folder / "fake" / "iree" / "compiler"
    (package / "_mlir_libs").mkdir(parents=True)
    binary = package / "_mlir_libs" / "iree-compile"
    binary.write_text(f"#!{sys.executable}\nimport os, signal, sys, time\n{script}\n")
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    for level in (package, package.parent):
        (level / "__init__.py").write_text("import pkgutil\n__path__ = pkgutil.extend_path(__path__, __name__)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "fake"), os.environ.get("PYTHONPATH", "")]))
    return Isolated(1)
