"""The modules of examples/tensorflow on IREE and TFLite, except those marked slow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

EXAMPLES = Path(__file__).parents[3] / "examples" / "tensorflow"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", sorted(file.name for file in EXAMPLES.glob("test_*.py")))
def test_examples_pass_or_fail_as_expected(file, tmp_path, environment):
    # Use a separate configuration, as a reader without this repository would.
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: takes long\n")
    options = ["-c", tmp_path / "pytest.ini", "--rootdir", tmp_path, "-m", "not slow", "-q"]
    backends = ["--target_backends=iree_llvmcpu,tflite", f"--artifacts_dir={tmp_path / 'traces'}"]
    command = [sys.executable, "-m", "pytest", *map(str, options), *backends, str(EXAMPLES / file)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
