"""`hil gate --bisect` in a git repository: the first commits with a wrong answer and with a slower model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.commands import Ended, whole_lines
from support.waiting import eventually

FLAGS = ("--runtime-hw-type", "sim", "--runtime", "onnxruntime", "--min-time", 0.1)
GIVEN = ("--input", "x=x.npy", "--expected", "y.npy")
COMMITS, WRONG, SLOW, UNBUILT = 8, 3, 6, 5


# Models with the outputs x * scale, made from the commit's settings. Their time is proportional to the layers.
BUILD = """
import pathlib
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def save_model(path, scale, layers):
    values = [np.eye(256, dtype=np.float32) * np.float32(scale if n == 0 else 1) for n in range(layers)]
    weights = [numpy_helper.from_array(value, f"w{n}") for n, value in enumerate(values)]
    names = ["x", *(f"m{n}" for n in range(layers))]
    nodes = [helper.make_node("MatMul", [names[n], f"w{n}"], [names[n + 1]]) for n in range(layers)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64, 256]) for name in (names[0], names[-1])]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


scale, layers, builds = pathlib.Path("settings.txt").read_text().split()
assert builds == "yes", "broken build"
save_model("wrong.onnx", float(scale), 2)
save_model("slow.onnx", 1, int(layers))
"""


def make_repository(folder: Path, hil: Callable[..., Ended], models: Sequence[str]) -> None:
    """Make a repository with good measurements of the first commit, and a bad one of the last."""

    def git(*args: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", *identity, *args], cwd=folder, check=True, capture_output=True)

    x = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", x)
    (folder / ".gitignore").write_text("*\n!settings.txt\n!build.py\n!hil.toml\n")
    (folder / "build.py").write_text(BUILD)
    (folder / "hil.toml").write_text("[history]\nauto = true\n")
    git("init", "-q", "-b", "main")
    for number in range(COMMITS):
        scale, layers = 1 if number < WRONG else 2, 2 if number < SLOW else 12
        (folder / "settings.txt").write_text(f"{scale} {layers} {'no' if number == UNBUILT else 'yes'}\n")
        git("add", "-A")
        git("commit", "-q", "--allow-empty", "-m", f"commit {number}")
        if number == 1:
            git("checkout", "-qb", "pr")
        if number in (0, COMMITS - 1):
            subprocess.run([sys.executable, "build.py"], cwd=folder, check=True)
            codes = [hil("bench", name, *FLAGS, *GIVEN).code for name in models]
            assert codes == [int(number > 0 and name == "wrong.onnx") for name in models]


BISECT = ("gate", "--bisect", f"{sys.executable} build.py")


def list_worktrees(repository: Path) -> int:
    return len(subprocess.check_output(["git", "worktree", "list"], cwd=repository).splitlines())


@pytest.mark.slow
def test_bisect_finds_wrong_and_slow_commits(tmp_path: Path, hil: Callable[..., Ended]) -> None:
    make_repository(repository := tmp_path, hil, ["wrong.onnx", "slow.onnx"])
    before = {path: path.stat().st_mtime_ns for path in repository.iterdir() if path.suffix in (".txt", ".onnx")}
    ended = hil(*BISECT, "--json", "--markdown", "gate.md")
    found = {one["key"]["case"]: one for one in ended.document["verdicts"]}
    assert (ended.code, found["wrong"]["verdict"], found["slow"]["verdict"]) == (1, "broken", "regressed"), found
    causes = {name: one["cause"] for name, one in found.items()}
    assert [one["subject"] for one in causes["wrong"]["candidates"]] == [f"commit {WRONG}"], causes
    # Commit 5 does not build, so it cannot be the only candidate for anything, and 6 is the first slow commit.
    assert [one["subject"] for one in causes["slow"]["candidates"]] == ["commit 5", "commit 6"], causes
    assert "could not be tested" in causes["slow"]["reason"]
    assert f"commit {WRONG}" in (repository / "gate.md").read_text()
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert list_worktrees(repository) == 1


def test_killed_bisect_resumes_with_its_trials(
    tmp_path: Path, hil: Callable[..., Ended], sharing_environment: dict[str, str]
) -> None:
    make_repository(repository := tmp_path, hil, ["wrong.onnx"])
    command = [sys.executable, "-m", "hil.controller.cli.main", *BISECT, "--json"]
    with subprocess.Popen(command, cwd=repository, env=sharing_environment, stdout=subprocess.DEVNULL) as process:
        (log,) = eventually(lambda: [*repository.glob("hil-gates/*gate*/bisect.jsonl")], within_s=60)
        eventually(lambda: len(whole_lines(log)) >= 3, within_s=60)
        os.kill(process.pid, signal.SIGKILL)
    kept = whole_lines(log)
    with log.open("a") as file:
        file.write('{"series": "')  # killed while it wrote a line
    assert hil("gate", "--resume", log.parent.name).code == 2  # a stored command never runs
    ended = hil(*BISECT, "--resume", log.parent.name, "--json")
    assert whole_lines(log)[: len(kept)] == kept
    (verdict,) = ended.document["verdicts"]
    assert [one["subject"] for one in verdict["cause"]["candidates"]] == [f"commit {WRONG}"], verdict
    trials = [one["tried"]["commit"] for one in whole_lines(log)]
    assert len(trials) == len(set(trials)) >= len(kept)
    assert list_worktrees(repository) == 1
