"""Prompts of a decoder in a suite, under pytest, and in reports and exports."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Ended

DECODER = Path(__file__).parents[2] / "examples" / "decoder" / "decoder.onnx"
PROMPTS = """
steps = 3
[[prompt]]
name = "hello"
tokens = [72, 101, 108, 108, 111]
[[prompt]]
name = "forced"
tokens = [84, 104, 101]
forced = [32, 98]
"""


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    """A directory with the decoder and two prompts."""
    folder = tmp_path / "nets"
    folder.mkdir()
    shutil.copy(DECODER, folder / "decoder.onnx")
    (folder / "decoder.generate.toml").write_text(PROMPTS)
    return folder


def test_suite_reports_each_prompt(nets: Path, hil: Callable[..., Ended]):
    done = hil("suite", "run", nets, "--flow", "onnxruntime", "--out", "monday")
    assert done.code == 0, done.out + done.err
    rows = list(csv.DictReader(io.StringIO((nets.parent / "monday/results.csv").read_text())))
    assert [(row["id"], row["outcome"]) for row in rows] == [("decoder_hello", "PASS"), ("decoder_forced", "PASS")]
    assert [(row["prompt_tokens"], row["steps"]) for row in rows] == [("5", "3"), ("3", "2")]
    assert all(float(row["worst_kl"]) <= float(row["kl_bound"]) and float(row["ttft_ms"]) > 0 for row in rows)
    assert "TTFT: " in (nets.parent / "monday/junit.xml").read_text()
    assert "decode_tokens_per_s" in (nets.parent / "monday/report.html").read_text()


def test_run_exports_times_for_llama_bench(nets: Path, hil: Callable[..., Ended]):
    spec = nets / "decoder.generate.toml"
    run = ("run", nets / "decoder.onnx", "--generate", spec, "--runtime", "onnxruntime", "--iterations", 2)
    done = hil(*run)
    assert done.code == 0 and "prompt of 5, 3 steps (chosen by the board)" in done.out, done.out + done.err
    rows = json.loads(hil("runs", "export", "latest", "--to", "llama-bench").out)
    assert [(row["n_prompt"], row["n_gen"], row["n_depth"]) for row in rows] == [
        (5, 0, 0),
        (0, 3, 5),
        (3, 0, 0),
        (0, 2, 3),
    ]
    assert all(len(row["samples_ns"]) == 2 and row["avg_ts"] > 0 for row in rows)


def test_pytest_collects_prompts(nets: Path, environment: dict[str, str]):
    (nets.parent / "pytest.toml").write_text('[pytest]\nhil_models = ["nets"]\n')
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--hil-flow=onnxruntime"]
    settings = {**os.environ, **environment}
    done = subprocess.run(command, cwd=nets.parent, env=settings, capture_output=True, text=True, timeout=240)
    assert "decoder_hello" in done.stdout and "decoder_forced" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0 and "2 passed" in done.stdout
