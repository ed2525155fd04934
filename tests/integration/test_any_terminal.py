"""Unusual stdout: an encoding other than UTF-8, a closed pipe, a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.models import DIGITS

Call = Callable[..., subprocess.CompletedProcess[str]]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


@pytest.fixture
def call(environment: dict[str, str], tmp_path: Path) -> Call:
    """Return a function that runs `hil ARGS...` with a given stdout or encoding."""

    def make(*args: object, stdout: object = subprocess.PIPE, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hil.controller.cli.main", *map(str, args)]
        settings = {"cwd": tmp_path, "env": {**environment, **variables}, "timeout": 400}
        return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, encoding="ascii", **settings)

    return make


@pytest.mark.slow
def test_cli_works_without_utf8_terminal(call, tmp_path):
    model = tmp_path / "zwölf 日本 ….onnx"
    model.write_bytes((DIGITS / "digits_cnn.onnx").read_bytes())
    suite = tmp_path / "models"
    suite.mkdir()
    (suite / "ü.onnx").write_bytes(model.read_bytes())
    simulated = ("--runtime-hw-type", "sim")
    for command in (
        ("run", model, *simulated, "--profile", "prof"),
        ("profile", "show", "prof"),
        ("runs", "list"),
        ("runs", "show", "latest"),
        ("bench", model, *simulated, "--min-time", "0.05"),
        ("suite", "run", suite, *simulated, "--no-layers", "--out", "suite"),
        ("layers", model),
        ("cache", "ls"),
        ("board", "list"),
    ):
        done = call(*command, **ASCII)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr, command


@pytest.mark.parametrize(
    "command", [("cache", "ls"), ("cache", "ls", "--json"), ("board", "list"), ("flows",), ("--help",), ("run", "-h")]
)
def test_cli_exits_quietly_on_closed_pipe(call, command):
    read, write = os.pipe()
    os.close(read)
    try:
        done = call(*command, stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, ""), "as of any Unix tool that SIGPIPE ends"


def test_cli_reports_full_disk_on_stdout(call):
    with Path("/dev/full").open("w") as full:
        done = call("board", "list", stdout=full)
    assert (done.returncode, done.stderr) == (2, "hil: cannot write: No space left on device\n")
