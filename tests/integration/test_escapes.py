"""Text from boards, models and tools never reaches a terminal or pipe unescaped."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.agents import start_process, stop_process
from support.models import save_model
from support.terminals import terminal

ATTACK = "a\x1b]0;title\x07\x1b[2J\x9b31m\u202eb"
# Escape codes that hil prints: colors, cursor of the progress bar, line erasure.
OWN = re.compile("\x1b\\[[0-9;]*m|\x1b\\[\\?25[lh]|\x1b\\[1A|\x1b\\[2K|\r")
FLOAT = TensorProto.FLOAT


def harmless(shown: str) -> str:
    """Return the output without hil's escape codes; fail if control characters remain."""
    rest = OWN.sub("", shown)
    odd = [
        rest[max(at - 60, 0) : at + 20] for at, char in enumerate(rest) if not (char.isprintable() or char in "\n\t")
    ]
    assert not odd, odd
    return rest


@pytest.fixture(scope="module")
def liar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a board with a hostile name."""
    folder = tmp_path_factory.mktemp("liar")
    process, address = start_process("hil.sim", f"unix:{folder}/sim.sock", folder / "store", "--name", ATTACK)
    yield address
    stop_process(process)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Save a model with hostile names, an uncompilable model, and a model with unexpected outputs."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    weight = numpy_helper.from_array(np.ones(4, np.float32), f"w{ATTACK}")
    for name, op in (("good", "Add"), (f"bad{ATTACK}", f"Op{ATTACK}")):
        node = helper.make_node(op, [f"x{ATTACK}", f"w{ATTACK}"], [f"y{ATTACK}"], f"node{ATTACK}")
        save_model(
            folder / f"{name}.onnx", [node], [(f"x{ATTACK}", FLOAT, [4])], [(f"y{ATTACK}", FLOAT, [4])], [weight]
        )
    np.savez(folder / "good.expected.npz", **{f"y{ATTACK}": np.full(4, 7, np.float32)})
    return folder


@pytest.mark.slow
def test_cli_escapes_hostile_text_in_all_output(hil, environment, tmp_path, models, liar):
    bad = f"theirs/bad{ATTACK}.onnx"
    seen = ""
    for words in (
        ("run", "theirs/good.onnx", "--board", liar),
        ("run", "theirs/good.onnx", "--board", liar, "--input", f"{ATTACK}=1"),
        ("run", bad, "--board", liar),
        ("run", f"{ATTACK}.onnx"),
        ("run", "theirs/good.onnx", "--board", ATTACK),
        (f"run{ATTACK}",),
        ("layers", "theirs/good.onnx"),
        ("bundle", "info", bad),
        ("suite", "run", "theirs", "--board", liar, "--no-layers", "--out", "out"),
        ("suite", "report", "out"),
        ("runs", "list"),
    ):
        ended = hil(*words)
        seen += harmless(ended.out) + harmless(ended.err)
    assert seen.count("\\x1b") > 10 and "\\u202e" in seen
    for words in (
        ("run", "theirs/good.onnx", "--board", liar),
        ("run", bad, "--board", liar),
        ("suite", "run", "theirs", "--board", liar, "--no-layers", "--out", "again"),
    ):
        with terminal("-m", "hil.controller.cli.main", *words, cwd=tmp_path, env=environment) as screen:
            screen.ended(240)
            assert "\x1b[" in screen.shown.decode(errors="replace")
            harmless(screen.shown.decode(errors="replace"))
    for words in (("run", bad, "--board", liar),):
        out = hil(*words, "--json").out
        json.loads(out)
        assert json.dumps(ATTACK)[1:-1] in out
        harmless(out)
    for report in ("summary.md", "results.csv", "outputs.csv", "junit.xml", "report.html"):
        harmless((tmp_path / "out" / report).read_text())


def test_pytest_plugin_escapes_hostile_text(environment, tmp_path, models, liar):
    # pytest prints file names unescaped.
    (models / f"bad{ATTACK}.onnx").rename(models / "bad.onnx")
    (tmp_path / "pytest.ini").write_text("[pytest]\nhil_models = theirs\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--hil-no-layers",
        "--hil-board",
        liar,
        "theirs",
    ]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert " failed" in ended.stdout, ended.stdout + ended.stderr
    assert "\\x1b" in harmless(ended.stdout)
