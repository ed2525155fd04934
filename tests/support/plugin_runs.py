"""Run pytest as a user does, in a separate directory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from onnx import TensorProto, helper

from support.models import DIGITS, save_model

INI = "[pytest]\nfilterwarnings = error\nhil_models = {models}\n{more}"
# Names of the tests of layers, for the digits model: conv1, relu1, pool1 and so on.
DIGITS_LAYERS = 8
# Plugins that take time and are not relevant.
QUICK = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]


@dataclass(frozen=True)
class Run:
    """Result of a run of pytest.

    Attributes:
        code: exit code.
        out: output.
        properties: test -> its properties in the JUnit file.
        outcomes: test -> passed, failure, error or skipped.
    """

    code: int
    out: str
    properties: dict[str, dict[str, str]]
    outcomes: dict[str, str]

    def command(self, what: str, number: int = 0) -> str:
        """Return a command from the report of a failure: ``repeat it`` or ``see the diff``."""
        return re.findall(rf"^{what}: +(.*)$", self.out, re.MULTILINE)[number]


class Project:
    """Directory of a user, with an ini file."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        folder.mkdir()
        self.folder = folder
        self.environment = {
            name: value for name, value in environment.items() if not name.startswith(("PYTEST", "COLUMNS"))
        } | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"}
        self.models = folder / "models"

    def set_up(self, *models: str | Path, ini: str = "", where: str = "models") -> Project:
        """Write the ini file, and copy models: names of models of the digits example, or files."""
        (self.folder / where).mkdir(parents=True, exist_ok=True)
        (self.folder / "pytest.ini").write_text(INI.format(models=where, more=ini))
        for model in models:
            shutil.copy(DIGITS / f"{model}.onnx" if isinstance(model, str) else model, self.folder / where)
        return self

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def start(self, *args: object) -> subprocess.Popen[str]:
        """Start pytest."""
        command = [sys.executable, "-m", "pytest", *QUICK, *map(str, args)]
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, text=True)

    def test(self, *args: object, cwd: Path | None = None) -> Run:
        """Run pytest in the directory."""
        junit = self.folder / "junit.xml"
        junit.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", f"--junitxml={junit}", *QUICK, *map(str, args)]
        done = self._run(command, cwd=cwd)
        found: dict[str, dict[str, str]] = {}
        outcomes = {}
        for case in ElementTree.parse(junit).iter("testcase") if junit.exists() else ():
            name = case.attrib["name"]
            found[name] = {one.attrib["name"]: one.attrib["value"] for one in case.iter("property")}
            ends = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            outcomes[name] = ends[0] if ends else "passed"
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        assert "INTERNALERROR" not in done.stdout + done.stderr, done.stdout + done.stderr
        return Run(done.returncode, done.stdout + done.stderr, found, outcomes)

    def shell(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command as pytest printed it."""
        return self._run(["sh", "-c", command])

    def _run(self, command: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        where = cwd or self.folder
        return subprocess.run(command, cwd=where, env=self.environment, capture_output=True, text=True, timeout=280)


def save_open(folder: Path) -> Path:
    """Save relu(x), N float32: one layer, and a dimension that --hil-dim sets."""
    node, value = helper.make_node("Relu", ["x"], ["y"], "relu"), (TensorProto.FLOAT, ["N"])
    return save_model(folder / "open.onnx", [node], [("x", *value)], [("y", *value)])


def save_small(folder: Path) -> Path:
    """relu(a) + b, 4 float32: two layers."""
    nodes = [helper.make_node("Relu", ["a"], ["r"], "relu"), helper.make_node("Add", ["r", "b"], ["y"], "add")]
    value = (TensorProto.FLOAT, [4])
    return save_model(folder / "small.onnx", nodes, [("a", *value), ("b", *value)], [("y", *value)])
