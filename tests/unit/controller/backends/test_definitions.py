"""Every reference is within 120 dB of the definition on each quantized layer type and on attention, or refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from hil.controller.backends.references.definitions.attention import compute_attention, rotate_heads
from hil.controller.backends.references.definitions.quantization import (
    MX_BLOCK,
    NVFP4_BLOCK,
    dequantize,
    dequantize_block_scaled,
    dequantize_nbits_weights,
    multiply_nbits,
    unpack_bits,
)
from hil.controller.backends.references.runners.onnx import make_evaluator, open_exact_session
from hil.core.tensors import Array, get_dtype_name
from hil.formats.ort_values import copy_from_ort, to_ort

FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16
NEAR_DB = 120.0
K, N, BLOCK = 64, 24, 16
CONTRIB = "com.microsoft"
Save = Callable[..., Path]


def random(seed: int, *shape: int, low: float = -1.0, high: float = 1.0) -> Array:
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


def sqnr_db(actual: Array, exact: Array) -> float:
    error = np.square(actual.astype(np.float64) - exact).sum()
    return float("inf") if error == 0 else float(10 * np.log10(np.square(exact.astype(np.float64)).sum() / error))


def model_of(
    node: Any, inputs: dict[str, Array], weights: dict[str, Array], outputs: tuple[str, ...] = ("y",), *more: Any
) -> onnx.ModelProto:
    """Return a model of opset 23 with these nodes; the outputs are float32 of any shape."""
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(one.dtype), one.shape)
        for name, one in inputs.items()
    ]
    shown = [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs]
    constants = [tensor_of(name, one) for name, one in weights.items()]
    graph = helper.make_graph([node, *more], "layer", values, shown, constants)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11)


def tensor_of(name: str, array: Array) -> onnx.TensorProto:
    return numpy_helper.from_array(array, name)


def answers(model: onnx.ModelProto, inputs: dict[str, Array], folder: Path) -> dict[str, list[Array]]:
    """Return the outputs of each reference that can run the model."""
    found: dict[str, list[Array]] = {
        "onnx-reference": [np.asarray(one) for one in make_evaluator(model).run(None, inputs)]
    }
    path = folder / "layer.onnx"
    onnx.save(model, path)
    try:
        session = open_exact_session(path)
        feeds = {name: to_ort(one) for name, one in inputs.items()}
        values = session.run_with_ort_values(None, feeds)
    except Exception:
        return found
    return found | {"onnxruntime": [copy_from_ort(one, "float32") for one in values]}


def check(model: onnx.ModelProto, inputs: dict[str, Array], exact: Array, folder: Path, *, least: int = 1) -> None:
    found = answers(model, inputs, folder)
    for name, outputs in found.items():
        assert sqnr_db(outputs[0], exact) >= NEAR_DB, name
    assert len(found) >= least


# --- DequantizeLinear

TYPES = ["int8", "uint8", "int4", "uint4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]
_DTYPES = {name: getattr(ml_dtypes, name) for name in TYPES[2:]} | {"int8": np.int8, "uint8": np.uint8}


def elements(name: str, shape: tuple[int, ...]) -> Array:
    if "int" in name:
        bits, signed = int(name.strip("uint")), not name.startswith("u")
        low = -(1 << (bits - 1)) if signed else 0
        return np.random.default_rng(3).integers(low, low + (1 << bits), shape).astype(np.int32).astype(_DTYPES[name])
    return random(3, *shape, low=-6, high=6).astype(_DTYPES[name])


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("form", ["tensor", "axis", "blocks"])
@pytest.mark.parametrize("has_zero", [False, True])
def test_dequantized_weights_match_definition(tmp_path: Path, name: str, form: str, has_zero: bool) -> None:
    w = elements(name, (K, N))
    shape: tuple[int, ...] = {"tensor": (), "axis": (N,), "blocks": (K // BLOCK, N)}[form]
    scale = random(1, *shape, low=0.01, high=0.03)
    zero = elements(name, shape) if has_zero and "int" in name else np.zeros(shape, w.dtype)
    names, weights = ["w", "s"], {"w": w, "s": scale}
    if has_zero:
        names.append("z")
        weights["z"] = zero
    options = {"block_size": BLOCK, "axis": 0} if form == "blocks" else {"axis": 1}
    x = random(0, 3, K)
    nodes = helper.make_node("DequantizeLinear", names, ["d"], **options), helper.make_node("MatMul", ["x", "d"], ["y"])
    wide = np.broadcast_to(scale, (N,)) if form != "blocks" else np.repeat(scale, BLOCK, axis=0)
    shift = np.repeat(zero, BLOCK, axis=0) if form == "blocks" else zero
    exact = x.astype(np.float64) @ ((w.astype(np.float64) - shift.astype(np.float64)) * wide.astype(np.float64))
    # ONNX Runtime has no kernels for float4.
    least = 1 if name.startswith("float4") else 2
    check(model_of(nodes[0], {"x": x}, weights, ("y",), nodes[1]), {"x": x}, exact, tmp_path, least=least)


@pytest.mark.parametrize("opset", [10, 13, 17, 19, 21, 23])
def test_dequantize_linear_supports_every_opset(save_onnx: Save, opset: int) -> None:
    weights = [tensor_of("w", elements("int8", (4, 3))), tensor_of("s", np.float32(0.5))]
    node = helper.make_node("DequantizeLinear", ["w", "s"], ["y"])
    path = save_onnx([node], [], [("y", FLOAT, (4, 3))], weights, opset=opset)
    (y,) = make_evaluator(onnx.load(path)).run(None, {})
    assert y.dtype == np.float32 and (y == elements("int8", (4, 3)) * np.float32(0.5)).all()


def test_dequantize_rejects_mismatched_scales() -> None:
    with pytest.raises(ValueError, match="blocks of 16"):
        dequantize(np.zeros((64, 4), np.int8), np.ones((3, 4), np.float32), axis=0, block_size=16)
    with pytest.raises(ValueError, match="axis 1"):
        dequantize(np.zeros((64, 4), np.int8), np.ones(3, np.float32), axis=1)


def test_dequantize_block_scaled_matches_formats() -> None:
    """MXFP4 and MXFP8 scale by powers of two; NVFP4 has float8 block scales and a tensor scale."""
    for dtype in (ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        x = random(0, 2, 2 * MX_BLOCK, low=-6, high=6).astype(dtype)
        scales = np.array([[0.5, 4], [1, 2**-9]], np.float32).astype(ml_dtypes.float8_e8m0fnu)
        y = dequantize_block_scaled(x, scales)
        assert (y[0, :MX_BLOCK] == x[0, :MX_BLOCK].astype(np.float64) * 0.5).all()
        assert (y[1, MX_BLOCK:] == x[1, MX_BLOCK:].astype(np.float64) * 2**-9).all()
    x = random(0, NVFP4_BLOCK, low=-6, high=6).astype(ml_dtypes.float4_e2m1fn)
    scale = np.array([1.75]).astype(ml_dtypes.float8_e4m3fn)
    y = dequantize_block_scaled(x, scale, block_size=NVFP4_BLOCK, global_scale=0.01)
    np.testing.assert_allclose(y, x.astype(np.float64) * 1.75 * 0.01, rtol=1e-15)


# --- MatMulNBits


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_unpack_bits_reverses_packing(bits: int, count: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 1 << bits, count)
    number = sum(int(value) << (bits * place) for place, value in enumerate(values))
    packed = np.frombuffer(number.to_bytes(-(-count * bits // 8) + 1, "little"), np.uint8)
    assert unpack_bits(packed, bits, count).tolist() == values.tolist()


def packed_weights(bits: int) -> tuple[dict[str, Array], Array, Array]:
    """Packed weights and zero points of MatMulNBits, and both as integers [N, K] and [N, blocks]."""
    rng = np.random.default_rng(bits)
    blocks = K // BLOCK
    values, zeros = rng.integers(0, 1 << bits, (N, K)), rng.integers(0, 1 << bits, (N, blocks))

    def pack(rows: Array, width: int) -> Array:
        texts = [sum(int(v) << (bits * place) for place, v in enumerate(row)).to_bytes(width, "little") for row in rows]
        return np.frombuffer(b"".join(texts), np.uint8)

    b = pack(values.reshape(-1, BLOCK), BLOCK * bits // 8).reshape(N, blocks, -1)
    z = pack(zeros, -(-blocks * bits // 8)).reshape(N, -1)
    return {"b": b, "z": z, "s": random(7, N, blocks, low=0.01, high=0.03)}, values, zeros


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zero", ["none", "packed", "float"])
@pytest.mark.parametrize("level", [0, 4])
def test_matmul_nbits_matches_definition(tmp_path: Path, bits: int, zero: str, level: int) -> None:
    weights, values, zeros = packed_weights(bits)
    names = ["x", "b", "s"]
    offset: Array = np.full_like(zeros, 1 << (bits - 1))
    if zero == "none":
        del weights["z"]
    else:
        names.append("z")
        offset = zeros
    if zero == "float":
        weights["z"] = zeros.astype(np.float32)
    shape = {"K": K, "N": N, "bits": bits, "block_size": BLOCK}
    node = helper.make_node("MatMulNBits", names, ["y"], domain=CONTRIB, accuracy_level=level, **shape)
    x = random(0, 3, K)
    exact_weights = (values - np.repeat(offset, BLOCK, axis=1)) * np.repeat(
        weights["s"].astype(np.float64), BLOCK, axis=1
    )
    exact = x.astype(np.float64) @ exact_weights.T
    check(model_of(node, {"x": x}, weights), {"x": x}, exact, tmp_path)


def test_matmul_nbits_accepts_group_indices_and_bias() -> None:
    weights, values, zeros = packed_weights(4)
    order = np.random.default_rng(1).integers(0, K // BLOCK, K).astype(np.int32)
    shape = {"rows": K, "columns": N, "bits": 4, "block_size": BLOCK}
    found = dequantize_nbits_weights(weights["b"], weights["s"], weights["z"], order, **shape)
    exact = (values - zeros[:, order]) * weights["s"].astype(np.float64)[:, order]
    np.testing.assert_allclose(found, exact, rtol=1e-15)
    a, bias = random(2, 2, K), random(3, N)
    np.testing.assert_allclose(multiply_nbits(a, found, bias), a.astype(np.float64) @ exact.T + bias, rtol=1e-12)


def test_matmul_nbits_rejects_unknown_attributes() -> None:
    weights, _, _ = packed_weights(4)
    del weights["z"]
    shape = {"K": K, "N": N, "bits": 4, "block_size": BLOCK, "weight_prepacked": 1}
    node = helper.make_node("MatMulNBits", ["x", "b", "s"], ["y"], domain=CONTRIB, **shape)
    x = random(0, 3, K)
    with pytest.raises(NotImplementedError, match="weight_prepacked"):
        make_evaluator(model_of(node, {"x": x}, weights)).run(None, {"x": x})


# --- normalization


def test_simplified_layer_normalization_matches_definition(tmp_path: Path) -> None:
    x, scale = random(0, 2, 5, K), random(1, K)
    node = helper.make_node("SimplifiedLayerNormalization", ["x", "g"], ["y"], epsilon=1e-3, axis=-1)
    wide = x.astype(np.float64)
    exact = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + 1e-3) * scale
    check(model_of(node, {"x": x}, {"g": scale}), {"x": x}, exact, tmp_path, least=2)


@pytest.mark.parametrize("has_bias", [False, True])
def test_skip_simplified_layer_norm_matches_definition(tmp_path: Path, has_bias: bool) -> None:
    inputs = {"x": random(0, 2, 5, K), "k": random(2, 2, 5, K)}
    weights = {"g": random(1, K), **({"b": random(3, K)} if has_bias else {})}
    names = ["x", "k", "g", *(["b"] if has_bias else [])]
    node = helper.make_node(
        "SkipSimplifiedLayerNormalization", names, ["y", "", "", "sum"], domain=CONTRIB, epsilon=1e-4
    )
    total = sum((one.astype(np.float64) for one in (*inputs.values(), *list(weights.values())[1:])), np.float64(0))
    exact = total / np.sqrt(np.square(total).mean(-1, keepdims=True) + 1e-4) * weights["g"]
    model = model_of(node, inputs, weights, ("y", "sum"))
    check(model, inputs, exact, tmp_path, least=2)
    for outputs in answers(model, inputs, tmp_path).values():
        np.testing.assert_allclose(outputs[1], total, rtol=1e-5, atol=1e-6)


# --- attention

BATCH, HEADS, KV, LENGTH, PAST, HEAD = 2, 4, 2, 3, 5, 16


def tables() -> tuple[Array, Array]:
    angles = np.arange(32)[:, None] / 100 ** (np.arange(HEAD // 2) / (HEAD // 2))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def naive_attention(q: Array, k: Array, v: Array, allowed: Callable[[int, int, int], bool], scale: float) -> Array:
    """Compute attention for each query, head and key separately."""
    y = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, h, s in np.ndindex(q.shape[:3]):
        keys = [j for j in range(k.shape[2]) if allowed(b, s, j)]
        group = h // (q.shape[1] // k.shape[1])
        scores = np.array([float(q[b, h, s].astype(np.float64) @ k[b, group, j].astype(np.float64)) for j in keys])
        weights = np.exp(scores * scale - (scores * scale).max())
        y[b, h, s] = (weights / weights.sum()) @ v[b, group, keys].astype(np.float64)
    return y


def joined(x: Array) -> Array:
    return np.concatenate(list(x.transpose(1, 0, 2, 3)), axis=-1)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("is_flat", [False, True])
def test_rotary_embedding_matches_definition(tmp_path: Path, interleaved: int, is_flat: bool) -> None:
    cos, sin = tables()
    x = random(0, BATCH, HEADS, LENGTH, HEAD)
    positions = np.array([[3, 4, 5], [7, 8, 9]], np.int64)
    exact = np.zeros(x.shape)
    for b, h, s, i in np.ndindex(BATCH, HEADS, LENGTH, HEAD // 2):
        one, other = (2 * i, 2 * i + 1) if interleaved else (i, i + HEAD // 2)
        value = complex(x[b, h, s, one], x[b, h, s, other])
        value *= complex(cos[positions[b, s], i], sin[positions[b, s], i])
        exact[b, h, s, one], exact[b, h, s, other] = value.real, value.imag
    inputs = {"x": joined(x) if is_flat else x, "p": positions}
    node = helper.make_node("RotaryEmbedding", ["x", "p", "c", "s"], ["y"], domain=CONTRIB, interleaved=interleaved)
    model = model_of(node, inputs, {"c": cos, "s": sin})
    check(model, inputs, joined(exact) if is_flat else exact, tmp_path, least=2)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("step", ["prompt", "next"])
@pytest.mark.parametrize("window", [-1, 3])
def test_group_query_attention_matches_definition(tmp_path: Path, rotary: bool, step: str, window: int) -> None:
    past, length = (0, LENGTH) if step == "prompt" else (PAST, 1)
    total = past + length
    q, k, v = (random(seed, BATCH, heads, length, HEAD) for seed, heads in enumerate((HEADS, KV, KV)))
    before = [random(5 + seed, BATCH, KV, past, HEAD) for seed in range(2)]
    inputs: dict[str, Array] = {"q": joined(q), "k": joined(k), "v": joined(v), "pk": before[0], "pv": before[1]}
    inputs |= {"len": np.full(BATCH, total - 1, np.int32), "total": np.array(total, np.int32)}
    cos, sin = tables()
    options = {"num_heads": HEADS, "kv_num_heads": KV, "scale": 0.3, "do_rotary": int(rotary)}
    options |= {"local_window_size": window}
    names = [*inputs, *(["c", "s"] if rotary else [])]
    node = helper.make_node("GroupQueryAttention", names, ["y", "nk", "nv"], domain=CONTRIB, **options)
    if rotary:
        where = np.broadcast_to(past + np.arange(length), (BATCH, length))
        q, k = rotate_heads(q, cos, sin, where), rotate_heads(k, cos, sin, where)
    keys, values = np.concatenate([before[0], k], axis=2), np.concatenate([before[1], v], axis=2)

    def allowed(b: int, s: int, j: int) -> bool:
        return j <= past + s and (window < 0 or j > past + s - window)

    exact = naive_attention(q, keys, values, allowed, 0.3)
    model = model_of(node, inputs, {"c": cos, "s": sin} if rotary else {}, ("y", "nk", "nv"))
    check(model, inputs, joined(exact), tmp_path, least=2)


@pytest.mark.parametrize("is_causal", [0, 1])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("past", [0, PAST])
@pytest.mark.parametrize("is_flat", [False, True])
def test_attention_matches_definition(tmp_path: Path, is_causal: int, mask: str, past: int, is_flat: bool) -> None:
    q, k, v = (random(seed, BATCH, heads, LENGTH, HEAD) for seed, heads in enumerate((HEADS, KV, KV)))
    before = [random(5 + seed, BATCH, KV, past, HEAD) for seed in range(2)]
    bias = np.zeros((LENGTH, past + LENGTH), np.float32)
    bias[1, 0] = -np.inf
    inputs = {"q": joined(q), "k": joined(k), "v": joined(v)} if is_flat else {"q": q, "k": k, "v": v}
    names = [*inputs, "" if mask == "none" else "m", *(["pk", "pv"] if past else [])]
    if mask != "none":
        inputs["m"] = bias == 0 if mask == "bool" else bias
    if past:
        inputs |= {"pk": before[0], "pv": before[1]}
    keys, values = np.concatenate([before[0], k], axis=2), np.concatenate([before[1], v], axis=2)
    options = {"q_num_heads": HEADS, "kv_num_heads": KV} if is_flat else {}
    outputs = ["y", "nk", "nv"] if past else ["y"]
    node = helper.make_node("Attention", names, outputs, is_causal=is_causal, **options)

    def allowed(b: int, s: int, j: int) -> bool:
        return (not is_causal or j <= past + s) and (mask == "none" or bias[s, j] == 0)

    exact = naive_attention(q, keys, values, allowed, HEAD**-0.5)
    model = model_of(node, inputs, {}, tuple(outputs))
    check(model, inputs, joined(exact) if is_flat else exact, tmp_path)


def test_attention_caps_products_and_zeroes_masked_queries() -> None:
    q = random(0, 1, 1, 2, 4)
    bias = np.array([[0.0, 0.0], [-np.inf, -np.inf]])
    y, products, probabilities = compute_attention(q, q, q, bias, scale=8.0, softcap=2.0)
    assert (y[0, 0, 1] == 0).all() and (probabilities[0, 0, 1] == 0).all()
    capped = np.exp(2 * np.tanh(products[0, 0, 0] / 2))
    np.testing.assert_allclose(probabilities[0, 0, 0], capped / capped.sum(), rtol=1e-12)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_elements_rejects_indices_out_of_range(axis: int) -> None:
    x = random(0, 3, 4)
    node = helper.make_node("GatherElements", ["x", "i"], ["y"], axis=axis)
    fine = np.array([[0, 1, -1], [2, -3, 1]], np.int64)
    wrong = np.array([[0, 1, x.shape[axis]]], np.int64)
    (y,) = make_evaluator(model_of(node, {"x": x, "i": fine}, {})).run(None, {"x": x, "i": fine})
    rows, columns = np.indices(fine.shape)
    assert (y == (x[fine, columns] if axis == 0 else x[rows, fine])).all()
    with pytest.raises(IndexError, match="out of range"):
        make_evaluator(model_of(node, {"x": x, "i": wrong}, {})).run(None, {"x": x, "i": wrong})


def test_output_dtype_matches_input_dtype() -> None:
    x = random(0, 3, K).astype(np.float16)
    node = helper.make_node("SimplifiedLayerNormalization", ["x", "g"], ["y"])
    (y,) = make_evaluator(model_of(node, {"x": x}, {"g": np.ones(K, np.float16)})).run(None, {"x": x})
    assert get_dtype_name(y.dtype) == "float16"


@pytest.mark.parametrize("opset", [1, 7, 11, 12, 13, 17])
@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_softmax_follows_opset(save_onnx: Save, op: str, opset: int, axis: int | None) -> None:
    x = random(0, 2, 3, 4)
    node = helper.make_node(op, ["x"], ["y"], **({} if axis is None else {"axis": axis}))
    path = save_onnx([node], [("x", FLOAT, x.shape)], [("y", FLOAT, x.shape)], opset=opset)
    (found,) = make_evaluator(onnx.load(path)).run(None, {"x": x})
    np.testing.assert_allclose(found, open_exact_session(path).run(None, {"x": x})[0], rtol=1e-5, atol=1e-6)


def test_evaluator_omits_inputs_after_omitted_outputs():
    nodes = [
        onnx.helper.make_node("Dropout", ["x"], ["y", ""]),
        onnx.helper.make_node("Clip", ["y", "", "most"], ["z"]),
    ]
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xz"]
    most = onnx.numpy_helper.from_array(np.float32(2), "most")
    graph = onnx.helper.make_graph(nodes, "g", values[:1], values[1:], [most])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    (found,) = make_evaluator(model).run(None, {"x": np.array([-3, 3], np.float32)})
    np.testing.assert_array_equal(found, [-3, 2])
