"""Copies of hil-npx with planted violations of the contract."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.npx import EXAMPLE
from support.pip import install

COMPILER, RUNTIME = "hil_npx/compiler.py", "hil_npx/runtime.py"
_RAISE = 'raise CompileFailed(\n                f"npx does not support the operator'
_HINT = "                hint=f\"supported, with one output: {', '.join(sorted(SUPPORTED))}\",\n"
_FLAG = 'raise CompileFailed(f"unknown flag {flag!r}", hint=f"expected {LANES}N")'
_PLACED = "self._placed = (Part.of(DEVICE, [step.name for step in self._steps]),)"
# Code after a run, by the model's only or first input.
_AFTER_RUN = """
        first = self.inputs[0]
        self._runs = getattr(self, "_runs", 0) + 1
        if first.dtype == "float32" and first.shape == (2, 4):
            self._given[0][...] = 0
        if len(self.outputs) == 2:
            self._results[0] = self._results[0] + self._runs - 1
        if first.dtype == "int8":
            self._results[0] = self._results[0].astype("int16")
        if first.dtype == "bool":
            self._results[0] = ~self._results[0]

    def fetch("""
# Violations that do not hide each other: rule -> (file, text, replacement).
PLANTED: dict[str, tuple[tuple[str, str, str], ...]] = {
    "group": (("pyproject.toml", '[project.entry-points."hil.targets"]', '[project.entry-points."hil.target"]'),),
    "load": (("pyproject.toml", '"hil_npx.link:connect"', '"hil_npx.links:connect"'),),
    "board-config": (("hil_npx/boards/npx-kit.toml", "[devices]", "[devcies]"),),
    "compile-error": ((COMPILER, _RAISE, _RAISE.replace("CompileFailed", "ValueError")), (COMPILER, _HINT, "")),
    "compiler-name": ((COMPILER, 'compiler=f"npx {VERSION}"', 'compiler="npx"'),),
    "cache-key": ((COMPILER, ', "lanes": lanes}\n    key', "}\n    key"), (COMPILER, _FLAG, "continue")),
    "recompute": ((COMPILER, 'make, order["recompute"])', "make, False)"),),
    "board-import": ((RUNTIME, "import numpy as np\n", "import numpy as np\n\nimport hil.plugins\n"),),
    "describe": ((RUNTIME, '"version": VERSION', '"version": ""'),),
    "load-error": ((RUNTIME, "raise LoadFailed(str(error)) from error", "raise"),),
    "leak": (
        (RUNTIME, _PLACED, f"{_PLACED}\n        OPEN.append(open(__file__))"),
        (RUNTIME, "LANES = 16", "LANES = 16\nOPEN = []"),
    ),
    "profile": ((RUNTIME, "            check(self.fetch())\n", ""),),
    "placement": ((RUNTIME, "return self._placed", "return list(self._placed)"),),
    # One of the runtime's faults for each model: writes to inputs, differs between runs, wrong dtype, wrong values.
    "inputs": ((RUNTIME, "\n    def fetch(", _AFTER_RUN),),
    "determinism": (),
    "outputs": (),
    "values": (),
}
TARGET = ("hil_npx/target.py", 'machine.get("arch")', 'machine["arch"]')
CRASH = (RUNTIME, "            program = read_program(folder / main)", "            import os\n            os.abort()")
HANG = (
    RUNTIME,
    "        self._times = []\n        for step",
    "        while True:\n            get_time_ns()\n        for step",
)


def plant(folder: Path, *changes: tuple[str, str, str], example: Path = EXAMPLE) -> Path:
    """Install a changed copy of a package in a new import directory. Return the directory."""
    package, site = folder / "package", folder / "site"
    shutil.copytree(example, package)
    for name, text, replacement in changes:
        path = package / name
        content = path.read_text()
        assert content.count(text) == 1, (name, text, content.count(text))
        path.write_text(content.replace(text, replacement))
    site.mkdir()
    install(package, site)
    return site
