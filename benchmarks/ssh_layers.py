"""Make small layer tests, compiled in advance, and run them with hil over SSH.

``python -m benchmarks.ssh_layers FOLDER ADDRESS IDENTITY KNOWN_HOSTS`` runs the tests of a directory once. The time of
this process includes its start and imports.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.choosing.board_factory import open_board
from hil.controller.devices.choosing.board_resolver import choose
from hil.core.files import digest_file
from hil.core.results import Artifact

WIDTH = 32
DEVICE = "local-sync"
LAYER = """
func.func @main(%x: tensor<1x{n}xf32>) -> tensor<1x{m}xf32> {{
  %w = arith.constant dense<"0x{weights}"> : tensor<{n}x{m}xf32>
  %zero = arith.constant dense<0.0> : tensor<1x{m}xf32>
  %y = linalg.matmul ins(%x, %w : tensor<1x{n}xf32>, tensor<{n}x{m}xf32>) outs(%zero : tensor<1x{m}xf32>)
         -> tensor<1x{m}xf32>
  %r = arith.maximumf %y, %zero : tensor<1x{m}xf32>
  return %r : tensor<1x{m}xf32>
}}
"""


@dataclass(frozen=True)
class Layer:
    """Test in a directory: the program, its input ``x.npy`` and the expected output ``expected.npy``."""

    folder: Path

    @property
    def program(self) -> Path:
        return self.folder / "layer.vmfb"

    @property
    def x(self) -> Path:
        return self.folder / "x.npy"

    def check(self, given: np.ndarray) -> None:
        """Check an output. The values are small whole numbers, so that right outputs are bit-equal."""
        expected = np.load(self.folder / "expected.npy")
        assert given.dtype == expected.dtype and np.array_equal(given, expected), self.folder


def make_layers(folder: Path, count: int) -> list[Layer]:
    """Write and compile dense layers with ReLU. Each has a different size and different weights."""
    from benchmarks.common import compile_mlir

    rng = np.random.default_rng(0)
    layers = [Layer(folder / f"{number:03}") for number in range(count)]
    for number, layer in enumerate(layers):
        layer.folder.mkdir(parents=True)
        n = WIDTH + number
        x, w = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((1, n), (n, WIDTH)))
        text = LAYER.format(n=n, m=WIDTH, weights=w.tobytes().hex().upper())
        layer.program.with_suffix(".mlir").write_text(text)
        np.save(layer.x, x)
        np.save(layer.folder / "expected.npy", np.maximum(x @ w, 0))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(compile_mlir, [layer.program.with_suffix(".mlir") for layer in layers]))
    return layers


def renew(layers: Sequence[Layer], turn: int) -> None:
    """Append bytes to the programs, which IREE ignores, so that the programs are new to the board."""
    for layer in layers:
        with layer.program.open("ab") as file:
            file.write(turn.to_bytes(8, "little"))


def choice_for(address: str, identity: Path, known_hosts: Path) -> BoardChoice:
    """Return a board by its address. Programs use one thread, like the rivals."""
    choice = choose(address, identity=identity, known_hosts=known_hosts)
    return replace(choice, config=replace(choice.config, devices={"iree": DEVICE}))


def artifact_of(layer: Layer) -> Artifact:
    """Return the artifact with a layer's program."""
    name = f"{layer.folder.name}.vmfb"
    return Artifact("iree", name, {name: layer.program}, {name: digest_file(layer.program)}, "main", "none")


def one_test(board: Board, layer: Layer) -> None:
    """Push, load, run, fetch, compare, unload."""
    artifact = artifact_of(layer)
    board.push(artifact)
    run(board, layer, artifact)


def run(board: Board, layer: Layer, artifact: Artifact) -> None:
    """Load, run, fetch, compare, unload."""
    with board.load(artifact) as program:
        result, _ = program.run({"x": np.load(layer.x)})
    (given,) = result.outputs.values()
    layer.check(given)


def one_by_one(choice: BoardChoice, layers: Sequence[Layer]) -> float:
    """Return the seconds for connecting, running all tests, and closing."""
    start = time.perf_counter()
    with open_board(replace(choice, purpose="benchmark")) as board:
        for layer in layers:
            one_test(board, layer)
    return time.perf_counter() - start


def together(choice: BoardChoice, layers: Sequence[Layer]) -> float:
    """Return the same seconds with one upload of all programs."""
    start = time.perf_counter()
    artifacts = [artifact_of(layer) for layer in layers]
    files = {artifact.main: layer.program for artifact, layer in zip(artifacts, layers, strict=True)}
    digests = {artifact.main: artifact.digests[artifact.main] for artifact in artifacts}
    with open_board(replace(choice, purpose="benchmark")) as board:
        board.push(replace(artifacts[0], files=files, digests=digests))
        for layer, artifact in zip(layers, artifacts, strict=True):
            run(board, layer, artifact)
    return time.perf_counter() - start


def main() -> None:
    """Run the tests of a directory."""
    folder, address, identity, known_hosts = sys.argv[1:]
    choice = choice_for(address, Path(identity), Path(known_hosts))
    layers = [Layer(path.parent) for path in sorted(Path(folder).glob("*/layer.vmfb"))]
    print(json.dumps({"seconds": together(choice, layers), "tests": len(layers)}))


if __name__ == "__main__":
    main()
