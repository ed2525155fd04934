"""`hil new-plugin` creates packages whose tests pass, and the example works on simulated boards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Ended
from support.models import DIGITS
from support.npx import install_npx

MODEL = DIGITS / "digits_cnn.onnx"


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("runtime", 3),
        pytest.param("board", 4, marks=pytest.mark.slow),
        pytest.param("reference", 2, marks=pytest.mark.slow),
    ],
)
def test_tests_of_new_package_pass(
    kind: str, count: int, hil: Callable[..., Ended], environment: dict[str, str], tmp_path: Path
) -> None:
    created = hil("new-plugin", "my-chip", "--kind", kind, "--json")
    assert created.code == 0, created.err
    assert created.document["package"] == "hil-my-chip"
    package = tmp_path / "hil-my-chip"
    texts = [path.read_text().lower() for path in package.rglob("*") if path.is_file()]
    assert not [text for text in texts if "npx" in text or "plain-ort" in text]
    install_npx(tmp_path / "site", environment, package)
    environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(package)]
    done = subprocess.run(command, env=environment, cwd=package, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} passed" in done.stdout


def test_package_runtime_profiles_on_simulated_board_with_arithmetic(
    hil: Callable[..., Ended], environment: dict[str, str], tmp_path: Path
) -> None:
    install_npx(tmp_path / "site", environment)
    settings = ("--runtime", "npx", "--runtime-hw-type", "sim-bf16", "--profile", "profile", "--no-fallback")
    ended = hil("run", MODEL, *settings, "--json")
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.err
    assert ended.case["profiles"][0]["notes"] == []
    (header, *rows) = (tmp_path / "profile" / "ops.csv").read_text().splitlines()
    assert "onnx_nodes" in header and any("conv1" in row for row in rows)
