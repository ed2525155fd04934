"""`python -m hil`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hil


def python_m_hil(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hil", *words], capture_output=True, text=True, timeout=300)


def test_python_m_hil_behaves_like_hil_command():
    told = python_m_hil("--version")
    assert (told.returncode, told.stdout) == (0, f"hil {hil.__version__}\n")
    wrong = python_m_hil("run", "no-such-model.onnx")
    assert wrong.returncode == 2
    assert "no-such-model.onnx" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert "Usage: hil run" in python_m_hil("run", "--help").stdout


@pytest.mark.parametrize(("words", "code"), [(("--version",), 0), (("run",), 2)])
def test_main_runs_exit_handlers_before_exit(words: tuple[str, ...], code: int):
    script = (
        "import atexit, sys, threading, time; from hil.controller.cli import main; before = main.call\n"
        "def call():\n"
        "    code = before()\n"
        "    atexit.register(print, 'tidied')\n"
        "    threading.Thread(target=lambda: (time.sleep(0.1), print('finished'))).start()\n"
        "    return code\n"
        "main.call = call; main.main()"
    )
    told = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=300)
    assert (told.returncode, told.stdout.splitlines()[-2:]) == (code, ["finished", "tidied"])


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_main_works_without_standard_streams(closed: str):
    for words, code in (("--version", 0), ("run no-such-model.onnx", 2)):
        told = subprocess.run(
            ["sh", "-c", f'"$1" -m hil {words} {closed}', "sh", sys.executable],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert (told.returncode, "Traceback" in told.stderr) == (code, False), told


def end_by(error: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that raises an error."""
    script = f"from hil.controller.cli import main\ndef fail(**_): raise {error}\nmain.cli.main = fail\nmain.main()"
    command = [sys.executable, "-c", script, "run", "--json"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_main_reports_path_error_as_bad_usage(tmp_path: Path):
    ended = end_by("OSError(36, 'File name too long', 'xxx')", tmp_path)
    assert (ended.returncode, list(tmp_path.iterdir())) == (2, [])
    assert json.loads(ended.stdout)["error"]["message"] == "xxx: File name too long"


@pytest.mark.parametrize("error", ["TypeError('lost')", "OSError(5, 'I/O error')", "MemoryError()"])
def test_main_unexpected_error_exits_70_with_crash_report(tmp_path: Path, error: str):
    ended = end_by(error, tmp_path)
    (report,) = tmp_path.glob("hil-crash-*")
    assert ended.returncode == 70 and str(report) in ended.stderr, ended.stderr
    document = json.loads(ended.stdout)
    assert (document["exit_code"], document["error"]["kind"]) == (70, "InternalError")
    assert error.partition("(")[0] in report.read_text()
