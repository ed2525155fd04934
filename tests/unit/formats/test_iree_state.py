"""Detecting modules with state. Damaged modules never raise."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from support.agents import compile_mlir

from hil.formats.iree_state import has_state

PLAIN = "func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {{ {} return %y : tensor<4xf32> }}"
WEIGHTS = PLAIN.format(
    "%w = arith.constant dense<[1.0,2.0,3.0,4.0]> : tensor<4xf32> %y = arith.addf %x, %w : tensor<4xf32>"
)
CONSTANT = "util.global private @w = dense<2.0> : tensor<4xf32>\n" + PLAIN.format(
    "%w = util.global.load @w : tensor<4xf32> %y = arith.addf %x, %w : tensor<4xf32>"
)
TENSOR = "util.global private mutable @s = dense<0.0> : tensor<4xf32>\n" + PLAIN.format(
    "%s = util.global.load @s : tensor<4xf32> %y = arith.addf %x, %s : tensor<4xf32> "
    "util.global.store %y, @s : tensor<4xf32>"
)
NUMBER = "util.global private mutable @n = {0} : {1}\nfunc.func @main(%y: {1}) -> {1} {{ \
%n = util.global.load @n : {1} util.global.store %y, @n : {1} return %n : {1} }}"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("text", "keeps"),
    [
        pytest.param(WEIGHTS, False, id="weights"),
        pytest.param(CONSTANT, False, id="constant"),
        pytest.param(TENSOR, True, id="tensor"),
        *(pytest.param(NUMBER.format("0", kind), True, id=kind) for kind in ("i32", "i64")),
        pytest.param(NUMBER.format("0.0", "f32"), True, id="f32"),
    ],
)
def test_state_detection_finds_written_variables(text: str, keeps: bool, tmp_path: Path):
    (tmp_path / "m.mlir").write_text(text)
    data = compile_mlir(tmp_path / "m.mlir", platform.machine(), tmp_path / "m.vmfb").path.read_bytes()
    assert has_state(memoryview(data)) is keeps
    for size in range(0, len(data), len(data) // 40):
        has_state(memoryview(data[:size]))
        has_state(memoryview(data[:size] + bytes(len(data) - size)))


@pytest.mark.parametrize("data", [b"", b"IREE", b"no module", b"\xff" * 100 + b"IREE" + b"\xff" * 100])
def test_state_detection_rejects_other_data(data: bytes):
    assert not has_state(memoryview(data))
