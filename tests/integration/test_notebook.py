"""The example notebook runs, and is stored with its outputs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command_server import REPOSITORY

STORED = REPOSITORY / "examples" / "notebook.ipynb"


def read_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def list_outputs(path: Path) -> list[list[str]]:
    """Return the MIME types of each cell's outputs. A command's output may come in any number of parts."""
    return [
        list(
            dict.fromkeys(
                kind for output in cell["outputs"] for kind in output.get("data", {output["output_type"]: ""})
            )
        )
        for cell in read_cells(path)
    ]


@pytest.mark.slow
def test_notebook_runs_and_shows_same_kinds_of_output(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "examples" / "digits", tmp_path / "digits")
    notebook = shutil.copy(STORED, tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "jupyter", "execute", "--inplace", "--timeout=100", notebook]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PATH": path}, check=True, capture_output=True)
    assert list_outputs(Path(notebook)) == list_outputs(STORED)
    shown = "".join(
        "".join(output["data"].get("text/html", ""))
        for cell in read_cells(Path(notebook))
        for output in cell["outputs"]
        if "data" in output
    )
    assert "<caption>digits_cnn</caption>" in shown and "FAIL: compared with onnxruntime" in shown
