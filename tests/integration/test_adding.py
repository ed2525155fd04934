"""Apply the example of docs/internals/adding.md to a copy of hil and run it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import Ended

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "internals" / "adding.md").read_text()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy the source tree. Python finds the `hil` package of the copy first."""
    folder = tmp_path / "tree"
    shutil.copytree(ROOT / "hil", folder / "hil", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "board_configs", folder / "board_configs")
    return folder


def blocks(heading: str) -> list[tuple[str, str]]:
    """Return language and text of the code blocks in a section."""
    section = GUIDE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```(\w*)\n(.*?)^```$", section, re.M | re.S)


def hil_of(folder: Path, environment: dict[str, str], *words: object) -> Ended:
    """Run `hil` of the copy in its parent directory."""
    environment = {**environment, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "hil", *map(str, words)]
    done = subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, text=True, timeout=300)
    return Ended(done.returncode, done.stdout, done.stderr)


def test_contributing_guide_adds_working_runtime(copy: Path, environment: dict[str, str]) -> None:
    (language, module), (_, entry) = blocks("Add a runtime")
    named = re.match(r"# file: (\S+)\n", module)
    assert language == "python" and named
    (copy / named[1]).write_text(module)
    table = copy / "hil" / "core" / "runtimes.py"
    text = table.read_text()
    assert text.count("_ALL = (\n") == 1
    table.write_text(text.replace("_ALL = (\n", f"_ALL = (\n{entry}"))

    model = ROOT / "examples" / "digits" / "digits_cnn.onnx"
    ended = hil_of(copy, environment, "run", model, "--runtime", "toy", "--json")

    assert ended.code == 0, ended.err + ended.out
    case = ended.case
    assert case["outcome"] == "PASS"
    assert case["artifact"]["runtime"] == "toy" and case["artifact"]["compiler"] == "none"
    helped = hil_of(copy, environment, "run", "--help")
    assert "toy, iree, onnxruntime" in " ".join(helped.out.split())
