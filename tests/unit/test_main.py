"""`python -m hil`."""

from __future__ import annotations

import subprocess
import sys

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
