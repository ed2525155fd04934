"""The next command removes temporary files of a killed command."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.commands import Ended
from support.fake_farm import start_hil
from support.models import DIGITS
from support.waiting import eventually

MODEL = DIGITS / "digits_cnn.onnx"


@pytest.fixture
def temporary(environment: dict[str, str]) -> Iterator[Path]:
    """Set the directory for temporary files of commands."""
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    environment |= {"TMPDIR": str(folder)}
    yield folder
    shutil.rmtree(folder)


def test_next_run_removes_files_of_killed_run(
    temporary: Path, environment: dict[str, str], hil: Callable[..., Ended], tmp_path: Path
) -> None:
    words = ("run", MODEL, "--runtime", "onnxruntime", "--board", "sim")
    killed = start_hil(environment, tmp_path, *words, "--fault", "hang")
    eventually(lambda: list(temporary.glob("hil-*/*/hil-sim-*/store/programs/*/*")), process=killed)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    left = list(temporary.glob("hil-*/*/*"))
    assert left
    ended = hil(*words)
    assert ended.code == 0, ended.err
    assert not list(temporary.glob("hil-*/*"))
