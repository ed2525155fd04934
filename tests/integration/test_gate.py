"""`hil gate` in a git repository: a slower model, a wrong answer, and an interrupted gate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.commands import Ended
from support.waiting import eventually

BENCH = ("bench", "m.onnx", "--runtime-hw-type", "sim", "--runtime", "onnxruntime", "--min-time", 0.1)


def save_layers(path: Path, layers: int) -> None:
    """Save a model whose time is proportional to the number of layers: x [64, 256] float32, MatMul and Relu each."""
    weights, rng = [], np.random.default_rng(0)
    nodes, value = [], "x"
    for n in range(layers):
        weights.append(numpy_helper.from_array((rng.normal(size=(256, 256)) / 16).astype(np.float32), f"w{n}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{n}"], [f"m{n}"], f"matmul{n}"))
        nodes.append(helper.make_node("Relu", [f"m{n}"], [f"r{n}"], f"relu{n}"))
        value = f"r{n}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64, 256]) for name in ("x", value)]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


@pytest.fixture
def git(tmp_path: Path) -> Callable[..., None]:
    def call(*args: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", *identity, *args], cwd=tmp_path, check=True, capture_output=True)

    return call


@pytest.fixture
def repository(tmp_path: Path, git: Callable[..., None], hil: Callable[..., Ended]) -> Path:
    """A repository with a fast model on main, measured twice, and the branch `pr`."""
    (tmp_path / "hil.toml").write_text("[history]\nauto = true\n")
    save_layers(tmp_path / "m.onnx", 2)
    git("init", "-q", "-b", "main")
    git("add", "hil.toml", "m.onnx")
    git("commit", "-qm", "fast")
    for _ in range(2):
        assert hil(*BENCH).code == 0
    git("checkout", "-qb", "pr")
    return tmp_path


def commit_slower(repository: Path, git: Callable[..., None], hil: Callable[..., Ended]) -> None:
    save_layers(repository / "m.onnx", 12)
    git("commit", "-qam", "slower")
    assert hil(*BENCH).code == 0


def test_gate_measures_slower_program_again(
    repository: Path, git: Callable[..., None], hil: Callable[..., Ended]
) -> None:
    commit_slower(repository, git, hil)
    ended = hil("gate", "--json", "--markdown", "gate.md", "--junit", "gate.xml", "--sarif", "gate.sarif")
    (found,) = ended.document["verdicts"]
    assert (ended.code, found["verdict"]) == (1, "regressed"), found
    assert found["ratio"] > 2 and found["rounds"] >= 4
    assert (found["old"]["again"], found["new"]["again"]) == ("PASS", "PASS")
    assert {one["name"] for one in found["slower_layers"] if one["is_new"]} <= {
        f"{op}{number}" for op in ("matmul", "relu") for number in range(2, 12)
    }
    assert "matmul2 +" in (repository / "gate.md").read_text() or found["layers_reason"], found
    assert "**regressed**" in (repository / "gate.md").read_text()
    assert json.loads((repository / "gate.sarif").read_text())["runs"][0]["results"]
    assert 'failures="1"' in (repository / "gate.xml").read_text()
    assert hil("gate", "--fail-on", "broken").code == 0


def test_gate_finds_wrong_answer_and_passes_unchanged_program(
    repository: Path, git: Callable[..., None], hil: Callable[..., Ended]
) -> None:
    git("commit", "-q", "--allow-empty", "-m", "nothing")
    assert hil(*BENCH).code == 0
    ended = hil("gate", "--json")
    (found,) = ended.document["verdicts"]
    assert (ended.code, found["verdict"], found["rounds"]) == (0, "no change", 0)
    save_layers(repository / "m.onnx", 3)
    git("commit", "-qam", "wrong")
    given = ("--input", "x=x.npy", "--expected", "y.npy")
    x = np.ones((64, 256), np.float32)
    np.save(repository / "x.npy", x)
    weights = np.random.default_rng(0).normal(size=(2, 256, 256)) / 16
    np.save(repository / "y.npy", np.maximum(np.maximum(x @ weights[0], 0) @ weights[1], 0).astype(np.float32))
    assert hil(*BENCH, *given).code == 1
    ended = hil("gate", "--json")
    (found,) = ended.document["verdicts"]
    assert (ended.code, found["verdict"], found["old"]["again"]) == (1, "broken", "PASS"), found


@pytest.mark.slow
def test_gate_blames_board_unless_second_board_decides(
    repository: Path, git: Callable[..., None], hil: Callable[..., Ended]
) -> None:
    save_layers(repository / "m.onnx", 3)
    git("commit", "-qam", "right")
    assert hil(*BENCH, "--fault", "corrupt").code == 1
    ended = hil("gate", "--json")
    (found,) = ended.document["verdicts"]
    assert (ended.code, found["verdict"]) == (4, "board fault"), found
    (repository / "other.toml").write_text('[board]\nname = "other"\nhw_type = "sim"\n[simulator]\n')
    ended = hil("gate", "--json", "--second-board", "other.toml")
    (found,) = ended.document["verdicts"]
    assert (ended.code, found["verdict"], found["second_board"]) == (0, "undecided", "other.toml"), found
    assert (found["old"]["again"], found["new"]["again"]) == ("PASS", "PASS")
    assert "both programs fail now" in found["board_problem"]


def test_killed_gate_resumes_with_its_rounds(
    repository: Path, git: Callable[..., None], hil: Callable[..., Ended], environment: dict[str, str]
) -> None:
    commit_slower(repository, git, hil)
    command = [sys.executable, "-m", "hil.controller.cli.main", "gate", "--json"]
    with subprocess.Popen(command, cwd=repository, env=environment, stdout=subprocess.DEVNULL) as process:
        runs = repository / "hil-gates"
        eventually(lambda: any(runs.glob("*gate*/rounds.csv")), within_s=60)
        os.kill(process.pid, signal.SIGKILL)
    (rounds,) = runs.glob("*gate*/rounds.csv")
    before = rounds.read_text().splitlines()
    ended = hil("gate", "--resume", rounds.parent.name, "--json")
    (found,) = ended.document["verdicts"]
    assert (ended.code, found["verdict"]) == (1, "regressed")
    assert rounds.read_text().splitlines()[: len(before)] == before
    assert found["rounds"] == len(rounds.read_text().splitlines())


# The simulated count depends on the size of the program, and the time on the fault `pace`.
COUNTED = (*BENCH, "--instructions", "--fault", "counter", "--fault", "pace:seconds=0.002")
# The noise of the times can make them suspect too, but cannot decide.
COARSE = ("--min-effect", 90, "--budget", 1)


def commit_padded(repository: Path, git: Callable[..., None], size: int) -> None:
    """Commit the model with more bytes, but with the same operators."""
    model = onnx.load(repository / "m.onnx")
    model.doc_string = "x" * size
    onnx.save(model, repository / "m.onnx")
    git("commit", "-qam", f"{size} bytes")


@pytest.fixture
def counted(tmp_path: Path, git: Callable[..., None], hil: Callable[..., Ended]) -> Path:
    """A repository with a small model on main, measured with instructions, and the branch `pr`."""
    save_layers(tmp_path / "m.onnx", 2)
    (tmp_path / "hil.toml").write_text("[history]\nauto = true\n")
    git("init", "-q", "-b", "main")
    git("add", "hil.toml", "m.onnx")
    git("commit", "-qm", "small")
    assert hil(*COUNTED).code == 0
    git("checkout", "-qb", "pr")
    return tmp_path


def test_gate_finds_more_instructions_at_the_same_time(
    counted: Path, git: Callable[..., None], hil: Callable[..., Ended]
) -> None:
    commit_padded(counted, git, 5000)
    assert hil(*COUNTED).code == 0
    ended = hil("gate", *COARSE, "--json", "--junit", "gate.xml")
    (found,) = ended.document["verdicts"]
    assert (ended.code, found["verdict"]) == (1, "regressed"), found
    assert (found["old"]["again"], found["new"]["again"]) == ("PASS", "PASS")
    assert found["instructions"]["ratio"] == found["new"]["instructions"] / found["old"]["instructions"] > 1.005
    assert " % instructions against " in found["reason"]
    assert " % instructions against " in (counted / "gate.xml").read_text()
    assert "instructions" in hil("history", "show", "m").out


@pytest.mark.slow
def test_bisect_finds_commit_with_more_instructions(
    counted: Path, git: Callable[..., None], hil: Callable[..., Ended]
) -> None:
    for size in (1000, 5000, 5200):
        commit_padded(counted, git, size)
    assert hil(*COUNTED).code == 0
    ended = hil("gate", *COARSE, "--bisect", "", "--json")
    (found,) = ended.document["verdicts"]
    assert (ended.code, found["verdict"]) == (1, "regressed"), found
    assert [one["subject"] for one in found["cause"]["candidates"]] == ["5000 bytes"], found["cause"]
    reasons = {one["reason"] for one in found["cause"]["tried"]}
    assert any(reason.startswith("+0.") and reason.endswith("% instructions") for reason in reasons), reasons
