"""Directory that attacks a user who runs hil in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Modules that hil and its processes import, early or late, and modules that Python imports to start a module.
SHADOWED = ("runpy", "typing", "json", "numpy", "onnx", "onnxruntime", "pip", "click", "grpc", "blake3", "ziglang")
_LEAVES_A_MARK = """
import os, sys
with open({marker!r}, "a") as file:
    print(__name__, sys.argv, file=file)
raise ImportError("not for you")
"""


def hostile_modules(folder: Path, marker: Path) -> None:
    """Write modules with the names above, and a package with entry points of every group.

    Each of them leaves a mark.
    """
    text = _LEAVES_A_MARK.format(marker=str(marker))
    for name in (*SHADOWED, "sitecustomize", "usercustomize", "evil_plugin", "conftest"):
        (folder / f"{name}.py").write_text(text)
    for name in ("hil", "iree"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(text)
    info = folder / "evil-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    groups = (
        "hil.links",
        "hil.flows",
        "hil.importers",
        "hil.compilers",
        "hil.references",
        "hil.runtimes",
        "hil.recipes",
        "hil.executorch_backends",
    )
    points = "".join(f"[{group}]\nevil = evil_plugin:thing\n" for group in groups)
    (info / "entry_points.txt").write_text(points)


def hostile_program(path: Path, marker: Path) -> None:
    """Write a program that leaves a mark."""
    path.write_text(f"#!/bin/sh\necho {path.name} >> '{marker}'\n")
    path.chmod(0o755)


def hil_command(words: Sequence[object], *, safe: bool = True) -> list[str]:
    """Return the installed command `hil`. Its script is in another directory, so that the working directory is on no
    path.
    """
    hil = Path(sys.executable).with_name("hil")
    assert not safe or hil.exists()
    return [str(hil), *map(str, words)]


def run(words: Sequence[object], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `hil` in the directory, without the tests' own directories on Python's path."""
    away = ("PYTHONPATH", "PYTHONSAFEPATH", "HIL_BOARDS", "HIL_BOARD")
    clean = {key: value for key, value in environment.items() if key not in away}
    return subprocess.run(
        hil_command(words),
        cwd=folder,
        env=clean | {"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
