"""Find a wrong layer and a slowdown in generated repositories of 16 commits, on a board that fails in 30 % of the runs.

    python -m benchmarks.gate_bisect --seeds 20

The programs run on the simulator. Faults are injected between hil and the simulator while `hil gate --bisect` searches:
the board is lost, the worker crashes, or outputs are corrupted. The result of a seed is right if hil names exactly the
two bad commits.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from hil.controller.analysis.bench.measure import measure_rounds
from hil.controller.cli.running.gate import gate
from hil.controller.pipeline.boards.board_session import BoardSession
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.runner import Runner
from hil.controller.workloads.gate.bisection.run import CauseFinder
from hil.core.results import Stage
from hil.errors import BoardLost, RunCrashed

COMMITS = 16
SHARE = 0.3
_LAYERS, _SLOW_LAYERS = 2, 6
_BENCH = ("--runtime-hw-type", "sim", "--runtime", "onnxruntime", "--min-time", "0.1")


@dataclass
class Faults:
    """Faults that affect a share of the runs while they are active."""

    random: random.Random
    is_active: bool = False
    runs: int = 0
    injected: int = 0

    def draw(self) -> str:
        """Return the fault of the next run, or ""."""
        if not self.is_active:
            return ""
        self.runs += 1
        if self.random.random() >= SHARE:
            return ""
        self.injected += 1
        return self.random.choice(("lost", "crash", "corrupt"))


@dataclass(frozen=True)
class FaultyRunner(Runner):
    """Runner with a board that has faults."""

    faults: Faults | None = None

    def execute(self, case: Case, session: BoardSession) -> Case:
        """Run the program on the board, or with a fault."""
        fault = self.faults.draw() if self.faults is not None and not case.outcome else ""
        if fault in ("lost", "crash"):
            error = BoardLost("injected reset") if fault == "lost" else RunCrashed("injected crash")
            return case.with_error(error, Stage.RUN)
        case = super().execute(case, session)
        if fault and case.result is not None:
            outputs = {name: array + np.float32(1) for name, array in case.result.outputs.items()}
            case = replace(case, result=replace(case.result, outputs=outputs))
        return case


@contextlib.contextmanager
def injecting(faults: Faults) -> Iterator[None]:
    """Inject faults during the search."""
    search = CauseFinder.run

    def run(self: CauseFinder, *arguments: Any) -> None:
        faults.is_active = True
        try:
            search(self, *arguments)
        finally:
            faults.is_active = False

    def rounds(*arguments: Any) -> Iterator[int]:
        for number in measure_rounds(*arguments):
            # A search measures about ten rounds in sequence, which count as one run.
            if number == 3 and faults.draw():
                raise BoardLost("injected reset")
            yield number

    package = "hil.controller.workloads.gate"
    with (
        mock.patch.object(CauseFinder, "run", run),
        mock.patch(f"{package}.run.Runner", functools.partial(FaultyRunner, faults=faults)),
        mock.patch(f"{package}.remeasure.measure_rounds", rounds),
    ):
        yield


def save_model(path: Path, scale: float, layers: int) -> None:
    """Save a model with the output x * scale, x [64, 256]. Its time is proportional to the number of layers."""
    values = [np.eye(256, dtype=np.float32) * np.float32(scale if n == 0 else 1) for n in range(layers)]
    weights = [numpy_helper.from_array(value, f"w{n}") for n, value in enumerate(values)]
    names = ["x", *(f"m{n}" for n in range(layers))]
    nodes = [helper.make_node("MatMul", [names[n], f"w{n}"], [names[n + 1]], f"matmul{n}") for n in range(layers)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64, 256]) for name in (names[0], names[-1])]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def run_hil(folder: Path, *arguments: str) -> None:
    """Run a command of hil."""
    command = [sys.executable, "-m", "hil.controller.cli.main", *arguments]
    subprocess.run(command, cwd=folder, check=False, capture_output=True)


def make_repository(folder: Path, wrong: int, slow: int, *, differs: bool) -> None:
    """Make a repository with a wrong commit and a slow commit. The first and the last commit are measured.

    The build chooses between two prepared files for each model.

    Args:
        differs: True if each commit has a different program. Otherwise, hil measures the time of each program only
            once.
    """

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)

    x = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", x)
    for number, (scale, layers) in enumerate(((1, _LAYERS), (2, _SLOW_LAYERS))):
        save_model(folder / f"answers{number}.onnx", scale, _LAYERS)
        save_model(folder / f"speed{number}.onnx", 1, layers)
    (folder / ".gitignore").write_text("hil-*/\n/answers.onnx\n/speed.onnx\n")
    (folder / "hil.toml").write_text("[history]\nauto = true\n")
    (folder / "build.sh").write_text("set -e\nread wrong slow number < settings.txt\n")
    with (folder / "build.sh").open("a") as file:
        file.write("cp answers$wrong.onnx answers.onnx\ncp speed$slow.onnx speed.onnx\n")
        if differs:
            # Append field 6 of an ONNX model, the documentation, which may follow all other fields.
            file.write("for name in answers speed; do printf '2\\002%02d' $number >> $name.onnx; done\n")
    git("init", "-q", "-b", "main")
    for number in range(COMMITS):
        (folder / "settings.txt").write_text(f"{int(number >= wrong)} {int(number >= slow)} {number}\n")
        git("add", "-A")
        git("commit", "-q", "--allow-empty", "-m", f"commit {number}")
        if number in (0, COMMITS - 1):
            subprocess.run(["sh", "build.sh"], cwd=folder, check=True)
            for model in ("answers.onnx", "speed.onnx"):
                run_hil(folder, "bench", model, *_BENCH, "--input", "x=x.npy", "--expected", "y.npy")
        if not number:
            git("checkout", "-q", "-b", "work")


def search(seed: int, say: Callable[[str], None], *, differs: bool) -> bool:
    """Search the commits of a seed. Return True if the result is right."""
    draw = random.Random(seed)
    wrong, slow = draw.randint(1, COMMITS - 1), draw.randint(1, COMMITS - 1)
    faults, begun = Faults(random.Random(seed + 1)), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hil-gate-bisect-") as place:
        folder = Path(place)
        make_repository(folder, wrong, slow, differs=differs)
        with contextlib.chdir(folder), injecting(faults):
            result = CliRunner().invoke(gate, ["--bisect", "sh build.sh", "--json"])
        try:
            verdicts = json.loads(result.stdout)["verdicts"]
        except ValueError:
            say(f"seed {seed}: no result: {result.output[-400:]} {result.exception!r}")
            return False
    found = {one["key"]["case"]: one for one in verdicts}
    subjects = {
        name: [commit["subject"] for commit in (one["cause"] or {"candidates": []})["candidates"]]
        for name, one in found.items()
    }
    is_right = subjects == {"answers": [f"commit {wrong}"], "speed": [f"commit {slow}"]}
    tried = {name: len((one["cause"] or {"tried": []})["tried"]) for name, one in found.items()}
    spent_s = sum(trial["board_s"] for one in verdicts for trial in (one["cause"] or {"tried": []})["tried"])
    verdict = "right" if is_right else f"WRONG {json.dumps(found)}"
    say(
        f"seed {seed}: wrong {wrong}, slow {slow}: named {subjects}; tests {tried}; faults {faults.injected} of"
        f" {faults.runs} runs; board {spent_s:.0f} s, all {time.monotonic() - begun:.0f} s: {verdict}"
    )
    return is_right


def main() -> int:
    """Search the commits of all seeds. Return 1 if any result is wrong."""
    parser = argparse.ArgumentParser("python -m benchmarks.gate_bisect", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="number of repositories (default: 20)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument("--same", action="store_true", help="only two programs for each model, as in most repositories")
    asked = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parent.parent))

    def say(text: str) -> None:
        print(text, flush=True)

    results = [search(seed, say, differs=not asked.same) for seed in range(asked.first, asked.first + asked.seeds)]
    say(f"{sum(results)} of {len(results)} right")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
