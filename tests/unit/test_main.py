"""`python -m hil`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hil


def python_m_hil(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hil", *words], capture_output=True, text=True, timeout=300)


def test_it_is_the_command_hil_with_its_name_and_its_exit_codes():
    told = python_m_hil("--version")
    assert (told.returncode, told.stdout) == (0, f"hil {hil.__version__}\n")
    wrong = python_m_hil("run", "no-such-model.onnx")
    assert wrong.returncode == 2
    assert "no-such-model.onnx" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert "Usage: hil run" in python_m_hil("run", "--help").stdout


@pytest.mark.parametrize(("words", "code"), [(("--version",), 0), (("run",), 2)])
def test_what_is_to_be_done_at_the_end_is_done_before_it_ends(words: tuple[str, ...], code: int):
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
def test_a_command_without_standard_streams_ends_as_ever(closed: str):
    for words, code in (("--version", 0), ("run no-such-model.onnx", 2)):
        told = subprocess.run(
            ["sh", "-c", f'"$1" -m hil {words} {closed}', "sh", sys.executable],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert (told.returncode, "Traceback" in told.stderr) == (code, False), told
