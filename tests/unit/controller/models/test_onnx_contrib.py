"""Operators of ONNX Runtime, expanded to standard operators: ONNX's evaluator and the definitions agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from hil.controller.backends.references.runners.decoder import widen_floats
from hil.controller.backends.references.runners.onnx import make_evaluator
from hil.controller.models.onnx_files.onnx_contrib import expand_contrib, find_contrib, remove_accuracy_levels
from hil.controller.models.onnx_files.onnx_rewrites import iter_rewrites, list_needed_rewrites
from hil.core.tensors import Array
from hil.errors import CompileFailed

CONTRIB = "com.microsoft"
BATCH, HEAD, POSITIONS = 2, 8, 32
HEADS = {"num_heads": 1, "kv_num_heads": 1}


def random(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def tables(width: int = HEAD) -> dict[str, Array]:
    angles = np.arange(POSITIONS)[:, None] * 10.0 ** -np.arange(width // 2)
    return {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}


def make_model(
    op: str,
    inputs: dict[str, Array],
    weights: dict[str, Array],
    outputs: tuple[str, ...] = ("y",),
    *,
    names: list[str] | None = None,
    domain: str = CONTRIB,
    opset: int = 21,
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a model with one operator whose float outputs have any shape."""
    node = helper.make_node(op, names or [*inputs, *weights], list(outputs), name="node", domain=domain, **attributes)
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(one.dtype), [None] * one.ndim)
        for name, one in inputs.items()
    ]
    shown = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs if name]
    held = [numpy_helper.from_array(one, name) for name, one in weights.items()]
    graph = helper.make_graph([node], "net", values, shown, held)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def check(model: onnx.ModelProto, inputs: dict[str, Array], opset: int = 21) -> None:
    """Check that the expansion computes the same in float32 as the definition in float64."""
    expanded = expand_contrib(model, opset)
    assert find_contrib(expanded) == []
    actual = ReferenceEvaluator(expanded).run(None, inputs)
    widen_floats(model)
    exact = {name: one.astype(np.float64) if one.dtype == np.float32 else one for name, one in inputs.items()}
    expected = make_evaluator(model).run(None, exact)
    for own, other in zip(actual, expected, strict=True):
        assert own.shape == other.shape
        np.testing.assert_allclose(own, other, rtol=0, atol=4e-6 * max(1.0, float(np.abs(other).max(initial=0.0))))


@settings(max_examples=40)
@given(
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    past=st.sampled_from([None, 0, 5]),
    length=st.integers(1, 4),
    rotary=st.sampled_from([0, HEAD // 2, HEAD]),
    is_interleaved=st.booleans(),
    has_positions=st.booleans(),
    is_packed=st.booleans(),
    window=st.sampled_from([-1, 1, 3]),
    softcap=st.sampled_from([0.0, 0.5]),
    scale=st.sampled_from([0.0, 0.7]),
    has_bias=st.booleans(),
)
def test_group_query_attention_equals_definition(
    kv_heads: int,
    group: int,
    past: int | None,
    length: int,
    rotary: int,
    is_interleaved: bool,
    has_positions: bool,
    is_packed: bool,
    window: int,
    softcap: float,
    scale: float,
    has_bias: bool,
) -> None:
    heads, total = kv_heads * group, (past or 0) + length
    sizes = (heads, kv_heads, kv_heads)
    query = [random(seed, BATCH, length, count * HEAD) for seed, count in enumerate(sizes)]
    inputs = {"q": np.concatenate(query, -1)} if is_packed else dict(zip("qkv", query, strict=True))
    names = [*inputs, *(["", ""] if is_packed else [])]
    if past is None:
        names += ["", ""]
    else:
        inputs |= {name: random(9 + n, BATCH, kv_heads, past, HEAD) for n, name in enumerate(("pk", "pv"))}
        names += ["pk", "pv"]
    inputs |= {"last": np.full(BATCH, total - 1, np.int32), "total": np.array(total, np.int32)}
    names += ["last", "total"]
    weights = tables(rotary) if rotary else {}
    names += [*weights] if rotary else ["", ""]
    names += ["where" if rotary and has_positions else "", "bias" if has_bias else ""]
    if rotary and has_positions:
        inputs["where"] = np.arange(BATCH * length, dtype=np.int64).reshape(BATCH, length)[:, ::-1]
    if has_bias:
        inputs["bias"] = random(20, BATCH, heads, length, total)
    model = make_model(
        "GroupQueryAttention",
        inputs,
        weights,
        ("y", "nk", "nv"),
        names=names,
        num_heads=heads,
        kv_num_heads=kv_heads,
        do_rotary=int(rotary > 0),
        rotary_interleaved=int(is_interleaved),
        local_window_size=window,
        softcap=softcap,
        scale=scale,
    )
    check(model, inputs)


@pytest.mark.parametrize("opset", [15, 17, 21])
def test_simplified_layer_normalization_equals_definition(opset: int) -> None:
    x = {"x": random(0, BATCH, 3, HEAD)}
    options: dict[str, Any] = {"domain": "", "opset": opset, "epsilon": 1e-3}
    model = make_model("SimplifiedLayerNormalization", x, {"scale": random(1, HEAD)}, ("y", "inverse"), **options)
    check(model, x, opset)


@pytest.mark.parametrize("has_bias", [False, True])
def test_skip_simplified_layer_normalization_equals_definition(has_bias: bool) -> None:
    x = {"x": random(0, BATCH, 3, HEAD), "skip": random(1, BATCH, 3, HEAD)}
    weights = {"scale": random(2, HEAD), **({"bias": random(3, HEAD)} if has_bias else {})}
    check(make_model("SkipSimplifiedLayerNormalization", x, weights, ("y", "", "", "sum")), x)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("points", ["none", "packed", "numbers"])
@pytest.mark.parametrize("rows", [64, 70])
@pytest.mark.parametrize("has_bias", [False, True])
def test_matmul_nbits_equals_definition(bits: int, points: str, rows: int, has_bias: bool) -> None:
    columns, block, blocks = 6, 32, -(-rows // 32)
    packed = np.random.default_rng(0).integers(0, 256, (columns, blocks, block * bits // 8), np.uint8)
    weights = {"b": packed, "scales": random(1, columns * blocks)}
    if points == "packed":
        weights["points"] = packed[:, 0, : -(-blocks * bits // 8)].copy()
    elif points == "numbers":
        weights["points"] = random(2, columns, blocks)
    if has_bias:
        weights["bias"] = random(3, columns)
    names = ["x", "b", "scales", "points" if points != "none" else "", "", "bias" if has_bias else ""]
    options: dict[str, Any] = {"K": rows, "N": columns, "bits": bits, "block_size": block, "accuracy_level": 4}
    x = {"x": random(4, 3, rows)}
    check(make_model("MatMulNBits", x, weights, names=names, **options), x)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("is_offset", [False, True])
@pytest.mark.parametrize("kind", ["flat", "flat with heads", "heads", "partial"])
def test_rotary_embedding_equals_definition(kind: str, is_offset: bool, is_interleaved: bool) -> None:
    x = random(0, BATCH, 3, 2 * HEAD) if "flat" in kind else random(0, BATCH, 2, 3, HEAD)
    positions = np.array([4] if is_offset else [[3, 4, 5], [7, 8, 9]], np.int64)
    options = {"flat with heads": {"num_heads": 2}, "partial": {"num_heads": 2, "rotary_embedding_dim": HEAD // 2}}
    inputs, attributes = {"x": x, "p": positions}, options.get(kind, {})
    weights = tables(HEAD // 2 if kind == "partial" else HEAD)
    check(make_model("RotaryEmbedding", inputs, weights, interleaved=int(is_interleaved), **attributes), inputs)


@pytest.mark.parametrize(
    ("op", "count", "attributes", "what"),
    [
        ("GroupQueryAttention", 12, HEADS, "input 11"),
        ("GroupQueryAttention", 7, {**HEADS, "smooth_softmax": 1}, "attribute smooth_softmax"),
        ("GroupQueryAttention", 9, {**HEADS, "do_rotary": 1}, "table of cosines"),
        ("MatMulNBits", 3, {"K": 4, "N": 2, "bits": 3}, "bits 3"),
        ("MatMulNBits", 5, {"K": 4, "N": 2}, "input g_idx"),
        ("RotaryEmbedding", 4, {"scale": 2.0, "rotary_embedding_dim": 4}, "attribute scale"),
        ("SimplifiedLayerNormalization", 2, {"axis": 0}, "axis 0"),
    ],
)
def test_expansion_refuses_other_attributes(op: str, count: int, attributes: dict[str, Any], what: str) -> None:
    inputs = {f"x{n}": np.zeros((1, 1, 4), np.float32) for n in range(count)}
    domain = "" if op.startswith("Simplified") else CONTRIB
    with pytest.raises(CompileFailed, match=f"cannot expand node 'node': unsupported {what}"):
        expand_contrib(make_model(op, inputs, {}, domain=domain, **attributes), 21)


def test_rewrites_expand_operators_in_subgraphs() -> None:
    weights = {"scale": random(1, HEAD), "yes": np.array(True)}
    x = {"x": random(0, 3, HEAD)}
    model = make_model("SimplifiedLayerNormalization", x, weights, names=["x", "scale"], domain="")
    shown = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    branches = {name: helper.make_graph(model.graph.node, name, [], [shown]) for name in ("then_branch", "else_branch")}
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("If", ["yes"], ["y"], **branches))
    name = "expansion of SimplifiedLayerNormalization"
    assert list_needed_rewrites(model) == [name]
    ((found, expanded),) = iter_rewrites(model)
    assert found == name and find_contrib(expanded) == []
    np.testing.assert_allclose(
        ReferenceEvaluator(expanded).run(None, x)[0], make_evaluator(model).run(None, x)[0], rtol=1e-6
    )


def test_rewrites_skip_expansion_if_conversion_fails(capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model("SkipSimplifiedLayerNormalization", {"x": random(0, 3, HEAD)}, {}, opset=10)
    model.graph.node.append(helper.make_node("Resize", ["y", "unknown scales"], ["z"]))
    assert list(iter_rewrites(model)) == []
    assert capsys.readouterr().out.splitlines()[1:] == [
        "note: cannot expand SkipSimplifiedLayerNormalization in opset 10, requires 15"
    ]


def test_expansion_keeps_standard_rotary_embedding() -> None:
    inputs = {"x": random(0, 1, 2, 3, HEAD)}
    assert find_contrib(make_model("RotaryEmbedding", inputs, tables(), domain="", opset=23)) == []


def test_remove_accuracy_levels_keeps_other_attributes() -> None:
    model = make_model("MatMulNBits", {"x": random(0, 3, 4)}, {}, K=4, N=2, accuracy_level=4)
    remove_accuracy_levels(model)
    assert {one.name for one in model.graph.node[0].attribute} == {"K", "N"}
