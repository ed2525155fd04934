from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hil.controller.backends.references.runners.onnx import run_evaluator
from hil.controller.models.importers.onnx_data import check_data, detach_weights, load_with_data
from hil.errors import ImportFailed
from hil.formats.onnx_file import load_onnx
from hil.formats.ort_values import ONNX_TYPES

LARGE = np.arange(1 << 15, dtype=np.float32)  # more than onnx's checker is shown


def made(*initializers: onnx.TensorProto, nodes=(), functions=(), sparse=()) -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (4,)) for name in "xy")
    nodes = [helper.make_node("Relu", ["x"], ["y"]), *nodes]
    graph = helper.make_graph(nodes, "g", [x], [y], list(initializers), sparse_initializer=list(sparse))
    return helper.make_model(graph, functions=list(functions))


def external(name: str = "w", dims=(4, 2), dtype: int = TensorProto.FLOAT, **fields: object) -> onnx.TensorProto:
    tensor = TensorProto(name=name, dims=dims, data_type=dtype, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "w.bin", **fields}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def cut(name: str = "w", array: np.ndarray = LARGE) -> onnx.TensorProto:
    tensor = numpy_helper.from_array(array, name)
    tensor.raw_data = tensor.raw_data[:-1]
    return tensor


def typed(dtype: int, dims, **fields: object) -> onnx.TensorProto:
    return TensorProto(name="w", data_type=dtype, dims=dims, **fields)


@pytest.mark.parametrize("dtype", ONNX_TYPES)
@pytest.mark.parametrize("raw", [True, False])
def test_check_data_accepts_every_onnx_type(dtype: str, raw: bool) -> None:
    number = ONNX_TYPES[dtype]
    if dtype == "string":
        tensor = helper.make_tensor("w", number, (3,), [b"a", b"b", b"c"])
    elif raw:
        zeros = np.zeros((3, 1), helper.tensor_dtype_to_np_dtype(number))
        tensor = numpy_helper.from_array(zeros, "w")
    else:
        tensor = helper.make_tensor("w", number, (3, 1), [1, 0, 1])
    assert check_data("m.onnx", made(tensor)) == {}


def test_check_data_accepts_empty_and_scalar_tensors() -> None:
    arrays = (np.zeros((0, 3), np.float32), np.float32(1), np.zeros(0, np.int64))
    assert check_data("m.onnx", made(*(numpy_helper.from_array(np.asarray(one), "w") for one in arrays))) == {}


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (cut(), r"tensor 'w' \(float32 \[32768\]\) has 131,071 of 131,072 bytes"),
        (typed(TensorProto.FLOAT, (64, 1024)), r"tensor 'w' \(float32 \[64, 1024\]\) has 0 of 65,536 elements"),
        (typed(TensorProto.FLOAT, (3,), float_data=[1.0, 2.0]), "has 2 of 3 elements"),
        (typed(TensorProto.FLOAT16, (3,), int32_data=[1, 2, 3, 4]), "has 4 of 3 elements"),
        (typed(TensorProto.INT4, (5,), int32_data=[1, 2]), "has 2 of 3 elements"),
        (typed(TensorProto.INT4, (5,), raw_data=b"12"), "has 2 of 3 bytes"),
        (typed(TensorProto.COMPLEX64, (2,), float_data=[1.0, 2.0]), "has 2 of 4 elements"),
        (typed(TensorProto.INT64, (1,), int32_data=[1]), "has data in int32_data: expected int64_data"),
        (typed(TensorProto.FLOAT, (1,), raw_data=bytes(4), float_data=[1.0]), "has raw_data together with float_data"),
        (typed(TensorProto.FLOAT, (-1,)), r"negative dimension: \[-1\]"),
        (typed(99, (1,)), "unknown element type 99"),
        (external(offset=-4), "invalid external offset '-4': expected a number of bytes"),
        (external(offset="0x10"), "invalid external offset '0x10'"),
        (external(length="many"), "invalid external length 'many'"),
        (external(length="1e1"), "invalid external length '1e1'"),
        (external(length=1000), r"'w' \(float32 \[4, 2\]\) has external length 1,000, expected 32 bytes"),
        (external(length=31), "has external length 31, expected 32 bytes"),
        (external(location=""), "has external data without a file name"),
        (external(dtype=TensorProto.STRING), "has external data of type string"),
    ],
)
def test_check_data_rejects_wrong_sizes(tensor: onnx.TensorProto, words: str) -> None:
    with pytest.raises(ImportFailed, match=words) as caught:
        check_data("m.onnx", made(tensor))
    assert caught.value.message.startswith("m.onnx: tensor 'w'")


def wrong_sparse() -> onnx.SparseTensorProto:
    values, indices = numpy_helper.from_array(np.ones(2, np.float32), "s"), cut("i", np.array([0, 3]))
    return helper.make_sparse_tensor(values, indices, [4])


@pytest.mark.parametrize("where", ["constant", "subgraph", "function", "default", "sparse", "sparse constant"])
def test_check_data_checks_tensors_anywhere(where: str) -> None:
    constant = helper.make_node("Constant", [], ["c"], name="k", value=cut("", LARGE))
    branch = helper.make_graph([], "b", [], [], [cut()])
    opsets = [helper.make_opsetid("", 17)]
    function = helper.make_function("own", "F", ["x"], ["c"], [constant], opsets)
    default = helper.make_function("own", "F", ["x"], ["x"], [], opsets, [])
    default.attribute_proto.append(helper.make_attribute("table", cut()))
    sparse = helper.make_node("Constant", [], ["c"], name="k", sparse_value=wrong_sparse())
    model, words = {
        "constant": (made(nodes=[constant]), "attribute 'value' of node 'k'"),
        "subgraph": (made(nodes=[helper.make_node("If", ["x"], ["z"], then_branch=branch)]), "tensor 'w'"),
        "function": (made(functions=[function]), "attribute 'value' of node 'k'"),
        "default": (made(functions=[default]), "attribute 'table' of function 'F'"),
        "sparse": (made(sparse=[wrong_sparse()]), r"tensor 's' \(indices\)"),
        "sparse constant": (made(nodes=[sparse]), r"attribute 'sparse_value' of node 'k' \(indices\)"),
    }[where]
    with pytest.raises(ImportFailed, match=f"m.onnx: {words}.* has [\\d,]+ of "):
        check_data("m.onnx", model)


def test_check_data_returns_needed_size_of_files() -> None:
    model = made(external("a", offset=64, length=32), external("b", offset=8), external("c", location="./sub/c.bin"))
    assert check_data("m.onnx", model) == {"w.bin": (96, "tensor 'a'"), "sub/c.bin": (32, "tensor 'c'")}


def test_load_whole_reads_linked_files_at_offsets(tmp_path: Path) -> None:
    array = np.arange(8, dtype=np.float32).reshape(4, 2)
    (tmp_path / "blob").write_bytes(b"1234" + array.tobytes())
    (tmp_path / "w.bin").symlink_to("blob")
    onnx.save(made(external("a", offset=4), external("none", dims=(0,))), tmp_path / "m.onnx")
    first, none = load_with_data(tmp_path / "m.onnx").graph.initializer
    assert np.array_equal(numpy_helper.to_array(first), array) and numpy_helper.to_array(none).shape == (0,)


WEIGHTS = {
    **{name: np.arange(-2, 2).astype(name) for name in ("float16", "float32", "float64", "int8", "int64", "bool")},
    "bfloat16": np.arange(4).astype(ml_dtypes.bfloat16),
    "int4": np.arange(-2, 2).astype(ml_dtypes.int4),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.float32(3),
}


def save_weights(path: Path) -> Path:
    """Save a model that returns each of WEIGHTS plus x, as float32, with all weights in a separate file."""
    initializers = [numpy_helper.from_array(np.asarray(array), name) for name, array in WEIGHTS.items()]
    nodes, outputs = [], []
    for name, array in WEIGHTS.items():
        nodes.append(helper.make_node("Cast", [name], [f"{name}.f"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Add", [f"{name}.f", "x"], [f"{name}.y"]))
        outputs.append(helper.make_tensor_value_info(f"{name}.y", TensorProto.FLOAT, np.shape(array) or (4,)))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (4,))
    graph = helper.make_graph(nodes, "weights", [x], outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    return path


def test_evaluator_reads_external_weights_of_any_dtype(tmp_path: Path) -> None:
    x = np.arange(4, dtype=np.float32)
    found = run_evaluator(str(save_weights(tmp_path / "m.onnx")), {"x": x})
    for name, array in WEIGHTS.items():
        np.testing.assert_array_equal(found[f"{name}.y"], np.asarray(array).astype(np.float32) + x)


def test_detached_weights_become_inputs_and_keep_their_file(tmp_path: Path) -> None:
    model = load_onnx(save_weights(tmp_path / "m.onnx"))
    weights = detach_weights(model, tmp_path)
    assert weights.keys() == WEIGHTS.keys() - {"bfloat16", "int4", "empty"}
    assert {value.name for value in model.graph.input} == {"x", *weights}
    assert {tensor.name for tensor in model.graph.initializer} == {"bfloat16", "int4", "empty"}
    before = (tmp_path / "w.bin").read_bytes()
    weights["float32"][0] = 9  # a private copy
    assert (tmp_path / "w.bin").read_bytes() == before
