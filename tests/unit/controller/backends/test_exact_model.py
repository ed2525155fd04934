"""ONNX Runtime reference sessions compute exact results on every CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hil.controller.backends.references.runners.exact_model import make_exact, needs_rewriting
from hil.controller.backends.references.runners.onnx import open_exact_session

UINT8, INT8, INT32, FLOAT = TensorProto.UINT8, TensorProto.INT8, TensorProto.INT32, TensorProto.FLOAT
FLOAT16, BOOL = TensorProto.FLOAT16, TensorProto.BOOL
RNG = np.random.default_rng(0)
A = RNG.integers(200, 256, (4, 64)).astype(np.uint8)
B = RNG.integers(100, 128, (64, 8)).astype(np.int8)
EXACT = A.astype(np.int64) @ B
STEP = float(EXACT.max() / 250)
Save = Callable[..., Path]


def scale(name: str, value: float) -> Any:
    return numpy_helper.from_array(np.float32(value), name)


def point(name: str, value: int, dtype: Any = np.uint8) -> Any:
    return numpy_helper.from_array(np.array(value, dtype), name)


def answer(path: Path, **inputs: Any) -> Any:
    return open_exact_session(path).run(None, inputs)[0]


@pytest.mark.parametrize("zero", [None, 0, 3, -5])
@pytest.mark.parametrize("is_constant", [True, False])
def test_integer_products_do_not_saturate(save_onnx: Save, zero: int | None, is_constant: bool) -> None:
    node = helper.make_node("MatMulInteger", ["a", "b", "", *(["z"] if zero is not None else [])], ["y"])
    weights = [numpy_helper.from_array(B, "b")] if is_constant else []
    weights += [point("z", zero, np.int8)] if zero is not None else []
    inputs = [("a", UINT8, (4, 64)), *([] if is_constant else [("b", INT8, (64, 8))])]
    path = save_onnx([node], inputs, [("y", INT32, (4, 8))], weights)
    given = {"a": A} if is_constant else {"a": A, "b": B}
    assert (answer(path, **given) == A.astype(np.int64) @ (B.astype(np.int64) - (zero or 0))).all()


@pytest.mark.parametrize("op", ["QLinearMatMul", "QGemm"])
def test_quantized_products_do_not_saturate(save_onnx: Save, op: str) -> None:
    names = ["a", "one", "zero", "b", "one", "point", *(["", "step", "zero"] if op == "QGemm" else ["step", "zero"])]
    node = helper.make_node(op, names, ["y"], domain="com.microsoft" if op == "QGemm" else "")
    weights = [numpy_helper.from_array(B, "b"), scale("one", 1), scale("step", STEP), point("zero", 0)]
    weights.append(point("point", 2, np.int8))
    path = save_onnx([node], [("a", UINT8, (4, 64))], [("y", UINT8, (4, 8))], weights, domains=("com.microsoft",))
    wanted = np.rint(A.astype(np.int64) @ (B.astype(np.int64) - 2) / STEP)
    assert np.abs(answer(path, a=A) - wanted).max() <= 1


@pytest.mark.parametrize(("kernel", "group"), [((4, 16, 3, 3), 1), ((4, 16, 1, 1), 1), ((16, 1, 3, 3), 16)])
def test_quantized_convolutions_do_not_saturate(save_onnx: Save, kernel: tuple[int, ...], group: int) -> None:
    x = RNG.integers(200, 256, (1, 16, 6, 6)).astype(np.uint8)
    w = RNG.integers(100, 128, kernel).astype(np.int8)
    windows = np.lib.stride_tricks.sliding_window_view(x[0].astype(np.int64), kernel[2:], axis=(1, 2))
    if group == 1:
        exact = np.einsum("chwij,ocij->ohw", windows, w.astype(np.int64))
    else:
        exact = np.einsum("chwij,cij->chw", windows, w[:, 0].astype(np.int64))
    step = float(exact.max() / 250)
    node = helper.make_node("QLinearConv", ["x", "one", "zero", "w", "one", "p", "step", "zero"], ["y"], group=group)
    weights = [numpy_helper.from_array(w, "w"), scale("one", 1), scale("step", step), point("zero", 0)]
    weights.append(point("p", 0, np.int8))
    path = save_onnx([node], [("x", UINT8, x.shape)], [("y", UINT8, (1, *exact.shape))], weights)
    assert np.abs(answer(path, x=x)[0] - np.rint(exact / step)).max() <= 1


def test_dynamically_quantized_products_do_not_saturate(save_onnx: Save) -> None:
    node = helper.make_node("DynamicQuantizeMatMul", ["a", "b", "one"], ["y"], domain="com.microsoft")
    weights = [numpy_helper.from_array(B, "b"), scale("one", 1)]
    path = save_onnx([node], [("a", FLOAT, (4, 64))], [("y", FLOAT, (4, 8))], weights, domains=("com.microsoft",))
    a = A.astype(np.float32)
    a[0, :2] = 0, 255
    np.testing.assert_allclose(answer(path, a=a), a @ B.astype(np.float32), rtol=1e-5)


def test_make_exact_leaves_signed_products_unchanged(save_onnx: Save) -> None:
    node = helper.make_node("MatMulInteger", ["a", "b"], ["y"])
    path = save_onnx([node], [("a", INT8, (4, 64))], [("y", INT32, (4, 8))], [numpy_helper.from_array(B, "b")])
    before = onnx.load(path)
    make_exact(after := onnx.load(path))
    assert before.SerializeToString() == after.SerializeToString()


def test_make_exact_removes_every_accuracy_level() -> None:
    def node(name: str) -> Any:
        return helper.make_node(
            "MatMulNBits", ["x", "b", "s"], [name], domain="com.microsoft", K=32, N=1, block_size=32, accuracy_level=4
        )

    value = helper.make_tensor_value_info
    branch = helper.make_graph([node("inner")], "branch", [], [value("inner", FLOAT, None)])
    choice = helper.make_node("If", ["c"], ["z"], then_branch=branch, else_branch=branch)
    function = helper.make_function("own", "F", ["x", "b", "s"], ["f"], [node("f")], [])
    graph = helper.make_graph([node("y"), choice], "g", [value("x", FLOAT, [1, 32])], [value("y", FLOAT, [1, 1])])
    model = helper.make_model(graph, functions=[function])
    make_exact(model)
    assert b"accuracy_level" not in model.SerializeToString()


def test_needs_rewriting_detects_integer_operators(save_onnx: Save) -> None:
    plain = save_onnx([helper.make_node("Neg", ["x"], ["y"])], [("x", FLOAT, (2,))], [("y", FLOAT, (2,))])
    assert not needs_rewriting(plain)
    node = helper.make_node("MatMulInteger", ["a", "b"], ["y"])
    whole = save_onnx([node], [("a", UINT8, (4, 64)), ("b", INT8, (64, 8))], [("y", INT32, (4, 8))])
    assert needs_rewriting(whole)


def test_exact_session_reads_external_weights(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["a", "b"], ["y"])],
        "g",
        [value("a", UINT8, [4, 64])],
        [value("y", INT32, [4, 8])],
        [numpy_helper.from_array(B, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    assert (answer(tmp_path / "m.onnx", a=A) == EXACT).all()


# float16: each operator rounds its result.
X = RNG.uniform(0.5, 2, 64).astype(np.float32)
HALF = X.astype(np.float16)
CHAIN = [helper.make_node("Mul", ["h", "h"], ["m"]), helper.make_node("Add", ["m", "h"], ["a"])]
CHAIN_EXACT = HALF * HALF + HALF
NARROW, WIDEN = helper.make_node("Cast", ["x"], ["h"], to=FLOAT16), helper.make_node("Cast", ["a"], ["y"], to=FLOAT)


def test_roundings_between_casts_are_kept(save_onnx: Save) -> None:
    path = save_onnx([NARROW, *CHAIN, WIDEN], [("x", FLOAT, (64,))], [("y", FLOAT, (64,))])
    np.testing.assert_array_equal(answer(path, x=X), CHAIN_EXACT.astype(np.float32))


def test_roundings_of_half_models_are_kept(save_onnx: Save) -> None:
    path = save_onnx(CHAIN, [("h", FLOAT16, (64,))], [("a", FLOAT16, (64,))])
    np.testing.assert_array_equal(answer(path, h=HALF), CHAIN_EXACT)


def test_overflow_of_half_values_is_kept(save_onnx: Save) -> None:
    nodes = [helper.make_node("Mul", ["h", "h"], ["m"]), helper.make_node("Div", ["m", "h"], ["a"])]
    path = save_onnx(nodes, [("h", FLOAT16, (1,))], [("a", FLOAT16, (1,))])
    assert np.isinf(answer(path, h=np.array([300], np.float16)))


def test_roundings_of_subgraphs_and_functions_are_kept(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    branch = helper.make_graph(CHAIN, "branch", [], [value("a", FLOAT16, [64])])
    choice = helper.make_node("If", ["c"], ["b"], then_branch=branch, else_branch=branch)
    function = helper.make_function("own", "Chain", ["h"], ["a"], CHAIN, opset_imports=[helper.make_opsetid("", 17)])
    call = helper.make_node("Chain", ["b"], ["z"], domain="own")
    graph = helper.make_graph(
        [NARROW, choice, call, helper.make_node("Cast", ["z"], ["y"], to=FLOAT)],
        "g",
        [value("x", FLOAT, [64]), value("c", BOOL, [])],
        [value("y", FLOAT, [64])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    onnx.save(helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    found = answer(tmp_path / "m.onnx", x=X, c=np.array(True))
    np.testing.assert_array_equal(found, (CHAIN_EXACT * CHAIN_EXACT + CHAIN_EXACT).astype(np.float32))


@pytest.mark.parametrize(
    ("nodes", "inputs"),
    [
        ([NARROW, helper.make_node("Cast", ["h"], ["y"], to=FLOAT)], [("x", FLOAT, (64,))]),
        ([helper.make_node("Cast", ["h"], ["y"], to=FLOAT)], [("h", FLOAT16, (64,))]),
    ],
)
def test_needs_rewriting_detects_half_values(save_onnx: Save, nodes: Any, inputs: Any) -> None:
    assert needs_rewriting(save_onnx(nodes, inputs, [("y", FLOAT, (64,))]))


def test_needs_rewriting_detects_half_weights(save_onnx: Save) -> None:
    nodes = [helper.make_node("Cast", ["w"], ["f"], to=FLOAT), helper.make_node("Mul", ["x", "f"], ["y"])]
    weights = [numpy_helper.from_array(HALF, "w")]
    assert needs_rewriting(save_onnx(nodes, [("x", FLOAT, (64,))], [("y", FLOAT, (64,))], weights))
