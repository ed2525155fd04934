"""`hil gate --bisect` in a git repository: the first bad commit, compiler flag, compiler and driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
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


BOARD = '[board]\nname = "lab"\nhw_type = "sim"\n[simulator]\n'
IREE = ("--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu")


def write_board(path: Path, *, flags: Sequence[str] = (), faults: Sequence[str] = ()) -> None:
    """Write the config of a simulated board."""
    compiled = f"[compile_flags]\niree = {list((*IREE, '--iree-llvmcpu-target-cpu=host', *flags))}\n" if flags else ""
    path.write_text(f"{BOARD}faults = {list(faults)}\n{compiled}")


@pytest.fixture
def measure(tmp_path: Path, hil: Callable[..., Ended]) -> Callable[..., Path]:
    """Measure a model twice, on the branches `main` and `pr`. The second outcome is FAIL."""

    def run(runtime: str, prepare: Callable[[Path, int], None]) -> Path:
        (tmp_path / "hil.toml").write_text("[history]\nauto = true\n")
        (tmp_path / ".gitignore").write_text("hil-*/\n")
        subprocess.run(["git", "init", "-q", "-b", "main"], cwd=tmp_path, check=True)
        for number, branch in enumerate(("main", "pr")):
            prepare(tmp_path, number)
            identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
            for words in (("checkout", "-qB", branch), ("add", "-A"), ("commit", "-qm", branch, "--allow-empty")):
                subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)
            ended = hil("run", "m.onnx", "--board", "board.toml", "--runtime", runtime, *GIVEN)
            assert ended.code == number, ended.output
        return tmp_path

    return run


def save_identity(folder: Path) -> None:
    """Save a model that returns its input, an input, and the expected output."""
    nodes, ends = [helper.make_node("Identity", ["x"], ["y"], "copy")], []
    for name in ("x", "y"):
        ends.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [64, 256]))
        np.save(folder / f"{name}.npy", np.full((64, 256), 1.001, np.float32))
    graph = helper.make_graph(nodes, "identity", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "m.onnx")


def find_cause(ended: Ended) -> dict[str, Any]:
    (verdict,) = ended.document["verdicts"]
    assert verdict["cause"] is not None, verdict
    return verdict["cause"]


def test_over_driver_finds_first_bad_version(measure: Callable[..., Path], hil: Callable[..., Ended]) -> None:
    def prepare(folder: Path, number: int) -> None:
        save_identity(folder)
        for driver in (1, 2, 3):
            write_board(folder / f"board-{driver}.toml", faults=["corrupt"] if driver > 1 else [])
        (folder / "board.toml").write_bytes((folder / f"board-{1 + 2 * number}.toml").read_bytes())

    folder = measure("onnxruntime", prepare)
    command = "cp board-$HIL_DRIVER.toml board.toml; echo $HIL_DRIVER >> installed"
    cause = find_cause(hil("gate", "--over", "driver=1,2,3", "--bisect", command, "--json"))
    assert (cause["axis"], [one["value"] for one in cause["candidates"]]) == ("driver", ["2"]), cause
    # The board gets the last version again.
    assert (folder / "installed").read_text().split() == ["3", "1", "2", "3"]


@pytest.mark.slow
def test_over_compiler_builds_with_each_version(measure: Callable[..., Path], hil: Callable[..., Ended]) -> None:
    def prepare(folder: Path, number: int) -> None:
        np.save(folder / "x.npy", np.ones((64, 256), np.float32))
        np.save(folder / "y.npy", np.ones((64, 256), np.float32))
        write_board(folder / "board.toml")
        (folder / "build.py").write_text(BUILD.split("scale, layers, builds =")[0] + COMPILER)
        subprocess.run([sys.executable, "build.py"], cwd=folder, env={**os.environ, "HIL_COMPILER": "14"}, check=True)
        if not number:
            subprocess.run(
                [sys.executable, "build.py"], cwd=folder, env={**os.environ, "HIL_COMPILER": "11"}, check=True
            )

    measure("onnxruntime", prepare)
    command = f"{sys.executable} build.py"
    cause = find_cause(hil("gate", "--over", "compiler=11,12,13,14", "--bisect", command, "--json"))
    # Version 12 does not build.
    assert [one["value"] for one in cause["candidates"]] == ["12", "13"], cause
    assert cause["axis"] == "compiler" and "1 compiler could not be tested" in cause["reason"]


COMPILER = """
import os
version = int(os.environ["HIL_COMPILER"])
assert version != 12
save_model("m.onnx", 2 if version > 12 else 1, 2)
"""


@pytest.mark.slow
def test_over_compiler_compiles_with_versions_of_package_index(
    measure: Callable[..., Path], hil: Callable[..., Ended]
) -> None:
    def prepare(folder: Path, number: int) -> None:
        save_identity(folder)
        write_board(folder / "board.toml", flags=["--arithmetic=bfloat16"] if number else ["--iree-opt-level=O2"])

    folder = measure("iree", prepare)
    cause = find_cause(hil("gate", "--over", f"compiler=3.12.0,{version('iree-base-compiler')}", "--json"))
    if "cannot install" in cause["reason"]:
        pytest.skip(cause["reason"])
    # The flags make the program wrong with both versions, so no compiler is the cause.
    assert cause["reason"].startswith("the program with compiler 3.12.0 is also bad: FAIL"), cause
    (log,) = folder.glob("hil-gates/*/compilers/3.12.0/logs/compile.log")
    assert "iree 3.12.0: done" in log.read_text()


@pytest.mark.slow
def test_over_flag_finds_first_bad_flag_and_resumes(measure: Callable[..., Path], hil: Callable[..., Ended]) -> None:
    def prepare(folder: Path, number: int) -> None:
        save_identity(folder)
        flags = ["--iree-opt-level=O3", "--arithmetic=bfloat16"] if number else ["--iree-opt-level=O2"]
        write_board(folder / "board.toml", flags=flags)

    folder = measure("iree", prepare)
    ended = hil("gate", "--over", "flag", "--json", "--markdown", "gate.md")
    cause = find_cause(ended)
    assert [one["value"] for one in cause["candidates"]] == ["--arithmetic=bfloat16 added"], cause
    assert "first bad flag: --arithmetic=bfloat16 added" in (folder / "gate.md").read_text()
    # Stored tests are not repeated.
    (log,) = folder.glob("hil-gates/*/bisect.jsonl")
    gate = json.loads((log.parent / "gate.json").read_text())
    gate["finished"], gate["verdicts"][0]["cause"] = False, None
    (log.parent / "gate.json").write_text(json.dumps(gate))
    before = log.read_text()
    assert hil("gate", "--resume", log.parent.name).code == 2  # --over is missing
    assert find_cause(hil("gate", "--resume", log.parent.name, "--over", "flag", "--json")) == cause
    assert log.read_text() == before
