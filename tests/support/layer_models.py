"""Models of many kinds for tests of layers, with seeded weights. Each function returns a ModelProto."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, BFLOAT16, INT64, BOOL = TensorProto.FLOAT, TensorProto.BFLOAT16, TensorProto.INT64, TensorProto.BOOL
Value = tuple[str, int, Any]
node = helper.make_node


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    constants: dict[str, Any] | None = None,
    *,
    opset: int = 17,
    domains: Sequence[str] = (),
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "net",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions)


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    spread = np.sqrt(np.prod(shape[1:]))
    return (np.random.default_rng(seed).standard_normal(shape) / spread).astype(np.float32)


def integers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def residual_cnn() -> onnx.ModelProto:
    """Conv, BatchNormalization and Relu, then a residual block, then a head. All nodes have names."""
    nodes = [
        node("Conv", ["image", "w1", "b1"], ["c1"], "stem", pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c1", "scale", "shift", "mean", "variance"], ["n1"], "stem_norm"),
        node("Relu", ["n1"], ["r1"], "stem_relu"),
        node("Conv", ["r1", "w2"], ["c2"], "block/conv1", pads=[1, 1, 1, 1]),
        node("Relu", ["c2"], ["r2"], "block/relu1"),
        node("Conv", ["r2", "w3"], ["c3"], "block/conv2", pads=[1, 1, 1, 1]),
        node("Add", ["c3", "r1"], ["sum"], "block/add"),
        node("Relu", ["sum"], ["r3"], "block/relu2"),
        node("GlobalAveragePool", ["r3"], ["pooled"], "pool"),
        node("Flatten", ["pooled"], ["flat"], "flatten"),
        node("MatMul", ["flat", "w4"], ["product"], "head"),
        node("Add", ["product", "b4"], ["biased"], "head_bias"),
        node("Sigmoid", ["biased"], ["scores"], "head_act"),
    ]
    constants = {
        "w1": weights(8, 3, 3, 3, seed=1), "b1": weights(8, seed=2), "w2": weights(8, 8, 3, 3, seed=3),
        "w3": weights(8, 8, 3, 3, seed=4), "w4": weights(8, 5, seed=5), "b4": weights(5, seed=6),
        "scale": np.ones(8, np.float32), "shift": weights(8, seed=7), "mean": weights(8, seed=8),
        "variance": np.full(8, 0.5, np.float32),
    }  # fmt: skip
    return model_of(nodes, [("image", FLOAT, (1, 3, 8, 8))], [("scores", FLOAT, (1, 5))], constants)


def branches_and_loops() -> onnx.ModelProto:
    """An If and a Loop. Both use a constant and a computed value from the outer graph."""
    then = helper.make_graph(
        [node("Mul", ["h", "two"], ["doubled"], "double")],
        "then",
        [],
        [helper.make_tensor_value_info("doubled", FLOAT, (2, 3))],
    )
    other = helper.make_graph(
        [node("Neg", ["h"], ["negated"], "negate")],
        "other",
        [],
        [helper.make_tensor_value_info("negated", FLOAT, (2, 3))],
    )
    body = helper.make_graph(
        [
            node("Add", ["state", "h"], ["next"], "step"),
            node("Mul", ["next", "two"], ["seen"], "look"),
            node("Identity", ["on"], ["still"], "keep_on"),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", INT64, ()),
            helper.make_tensor_value_info("on", BOOL, ()),
            helper.make_tensor_value_info("state", FLOAT, (2, 3)),
        ],
        [
            helper.make_tensor_value_info("still", BOOL, ()),
            helper.make_tensor_value_info("next", FLOAT, (2, 3)),
            helper.make_tensor_value_info("seen", FLOAT, (2, 3)),
        ],
    )
    nodes = [
        node("Tanh", ["x"], ["h"], "squash"),
        node("ReduceSum", ["x"], ["total"], "sum", keepdims=0),
        node("Greater", ["total", "zero"], ["positive"], "ask"),
        node("If", ["positive"], ["chosen"], "choose", then_branch=then, else_branch=other),
        node("Loop", ["three", "yes", "chosen"], ["last", "every"], "repeat", body=body),
    ]
    constants = {"two": np.float32(2), "zero": np.float32(0), "three": np.int64(3), "yes": np.bool_(True)}
    outputs = [("last", FLOAT, (2, 3)), ("every", FLOAT, (3, 2, 3))]
    return model_of(nodes, [("x", FLOAT, (2, 3))], outputs, constants)


def dynamic_batch() -> onnx.ModelProto:
    """Read the batch size from the input's shape, and use it in a Reshape."""
    nodes = [
        node("Relu", ["x"], ["r"], "act"),
        node("Shape", ["r"], ["shape"], "shape"),
        node("Gather", ["shape", "first"], ["batch"], "batch"),
        node("Unsqueeze", ["batch", "axis"], ["batches"], "unsqueeze"),
        node("Concat", ["batches", "rest"], ["target"], "concat", axis=0),
        node("Reshape", ["r", "target"], ["flat"], "reshape"),
        node("MatMul", ["flat", "w"], ["y"], "head"),
    ]
    constants = {"first": np.int64(0), "axis": integers(0), "rest": integers(12), "w": weights(12, 4)}
    return model_of(nodes, [("x", FLOAT, ("N", 3, 4))], [("y", FLOAT, ("N", 4))], constants)


def repeated() -> onnx.ModelProto:
    """Nodes without names: three equal blocks, two of them with the same weights, and one different block."""
    nodes, value = [], "x"
    for number, weight in enumerate(["w1", "w2", "w1"]):
        nodes += [
            node("MatMul", [value, weight], [f"m{number}"]),
            node("LeakyRelu", [f"m{number}"], [f"a{number}"], alpha=0.1),
        ]
        value = f"a{number}"
    nodes += [
        node("LeakyRelu", [value], ["b"], alpha=0.2),
        node("Slice", ["b", "from0", "to2", "axis"], ["left"]),
        node("Slice", ["b", "from2", "to4", "axis"], ["right"]),
        node("Concat", ["right", "left"], ["y"], axis=1),
    ]
    constants = {
        "w1": weights(4, 4, seed=1), "w2": weights(4, 4, seed=2), "axis": integers(1),
        "from0": integers(0), "to2": integers(2), "from2": integers(2), "to4": integers(4),
    }  # fmt: skip
    return model_of(nodes, [("x", FLOAT, (2, 4))], [("y", FLOAT, (2, 4))], constants)


def optional_and_split() -> onnx.ModelProto:
    """Omitted inputs, a node with three outputs of which one is unused, and an output that is used twice."""
    nodes = [
        node("Clip", ["x", "", "most"], ["c"], "clip"),
        node("Split", ["c", "sizes"], ["a", "b", "unused"], "split", axis=1),
        node("Add", ["a", "a"], ["twice"], "double"),
        node("Mul", ["twice", "b"], ["y"], "mul"),
        node("Resize", ["image", "", "scales"], ["z"], "resize", mode="nearest"),
    ]
    constants = {
        "most": np.float32(0.5), "sizes": integers(2, 2, 1), "scales": np.array([1, 1, 2, 2], np.float32),
    }  # fmt: skip
    inputs = [("x", FLOAT, (2, 5)), ("image", FLOAT, (1, 1, 2, 2))]
    return model_of(nodes, inputs, [("y", FLOAT, (2, 2)), ("z", FLOAT, (1, 1, 4, 4)), ("c", FLOAT, (2, 5))], constants)


def lstm() -> onnx.ModelProto:
    """Recurrent network of which the sequence and the last state are used."""
    nodes = [
        node("LSTM", ["x", "w", "r", "b"], ["all", "last", ""], "lstm", hidden_size=4),
        node("Squeeze", ["all", "axis"], ["sequence"], "squeeze"),
        node("Relu", ["last"], ["state"], "act"),
    ]
    constants = {
        "w": weights(1, 16, 3),
        "r": weights(1, 16, 4, seed=1),
        "b": weights(1, 32, seed=2),
        "axis": integers(1),
    }
    outputs = [("sequence", FLOAT, (5, 2, 4)), ("state", FLOAT, (1, 2, 4))]
    return model_of(nodes, [("x", FLOAT, (5, 2, 3))], outputs, constants)


def sequences() -> onnx.ModelProto:
    """Values that are lists of tensors, between nodes without lists."""
    nodes = [
        node("Relu", ["x"], ["r"], "act"),
        node("SequenceConstruct", ["r", "x"], ["list"], "pack"),
        node("Neg", ["r"], ["n"], "neg"),
        node("SequenceInsert", ["list", "n"], ["longer"], "insert"),
        node("ConcatFromSequence", ["longer"], ["joined"], "join", axis=0),
        node("Tanh", ["joined"], ["y"], "last"),
    ]
    return model_of(nodes, [("x", FLOAT, (2, 3))], [("y", FLOAT, (6, 3))])


def constant_sequences() -> onnx.ModelProto:
    """Lists that are empty or contain only constants."""
    nodes = [
        node("SequenceEmpty", [], ["empty"], "begin"),
        node("SequenceInsert", ["empty", "x"], ["one"], "first"),
        node("ConcatFromSequence", ["one"], ["a"], "join_one", axis=0),
        node("SequenceConstruct", ["c1", "c2"], ["two"], "constants"),
        node("SequenceInsert", ["two", "a"], ["three"], "third"),
        node("ConcatFromSequence", ["three"], ["y"], "join_three", axis=0),
    ]
    constants = {"c1": weights(2, 3), "c2": weights(2, 3, seed=1)}
    return model_of(nodes, [("x", FLOAT, (2, 3))], [("y", FLOAT, (6, 3))], constants)


def noisy() -> onnx.ModelProto:
    """Random numbers from a separate node, from the branch of an If that always runs, and from a Dropout in training
    mode.

    Also a Dropout in inference mode, and nodes that do not depend on random numbers.
    """
    branches = {
        name: helper.make_graph(
            [node("RandomUniform", [], [f"{name}.out"], f"{name}.draw", shape=[2, 3])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}.out", FLOAT, (2, 3))],
        )
        for name in ("then_branch", "else_branch")
    }
    nodes = [
        node("RandomNormalLike", ["x"], ["n"], "noise", seed=1.0),
        node("Add", ["x", "n"], ["a"], "add"),
        node("If", ["yes"], ["u"], "choose", **branches),
        node("Dropout", ["x", "half", "yes"], ["d", ""], "drop"),
        node("Sum", ["a", "u", "d"], ["y"], "sum"),
        node("Dropout", ["x", "half", "no"], ["same", ""], "keep"),
        node("Neg", ["same"], ["z"], "neg"),
    ]
    constants = {"yes": np.bool_(True), "no": np.bool_(False), "half": np.float32(0.5)}
    return model_of(nodes, [("x", FLOAT, (2, 3))], [("y", FLOAT, (2, 3)), ("z", FLOAT, (2, 3))], constants)


def indices_of_nonzero() -> onnx.ModelProto:
    """Shape that depends on the values of the input."""
    nodes = [
        node("Relu", ["x"], ["r"], "act"),
        node("NonZero", ["r"], ["where"], "where"),
        node("Cast", ["where"], ["y"], "cast", to=FLOAT),
    ]
    return model_of(nodes, [("x", FLOAT, (4, 5))], [("y", FLOAT, (2, "found"))])


def local_function() -> onnx.ModelProto:
    """Two calls of a local function of the model."""
    scaled = helper.make_function(
        "own", "ScaledTanh", ["value"], ["result"],
        [
            node("Constant", [], ["two"], "two", value_float=2.0),
            node("Mul", ["value", "two"], ["scaled"], "scale"),
            node("Tanh", ["scaled"], ["result"], "squash"),
        ],
        [helper.make_opsetid("", 17)],
    )  # fmt: skip
    nodes = [
        node("ScaledTanh", ["x"], ["h"], "first", domain="own"),
        node("ScaledTanh", ["h"], ["y"], "second", domain="own"),
    ]
    shape = (2, 3)
    return model_of(nodes, [("x", FLOAT, shape)], [("y", FLOAT, shape)], domains=["own"], functions=[scaled])


def of_onnxruntime_alone() -> onnx.ModelProto:
    """Operator whose output type onnx cannot infer."""
    nodes = [
        node("FusedMatMul", ["x", "w"], ["h"], "fused", domain="com.microsoft", alpha=0.5),
        node("Relu", ["h"], ["r"], "act"),
        node("Reshape", ["r", "target"], ["y"], "reshape"),
    ]
    constants = {"w": weights(3, 4), "target": integers(-1)}
    return model_of(nodes, [("x", FLOAT, (2, 3))], [("y", FLOAT, (8,))], constants, domains=["com.microsoft"])


def of_bfloat16() -> onnx.ModelProto:
    """Product for which ONNX Runtime has no CPU kernel."""
    nodes = [node("MatMul", ["a", "b"], ["m"], "product"), node("Neg", ["m"], ["y"], "negate")]
    return model_of(nodes, [("a", BFLOAT16, (2, 3)), ("b", BFLOAT16, (3, 2))], [("y", BFLOAT16, (2, 2))])


def folded() -> onnx.ModelProto:
    """Weights computed from other weights, a constant output, an input as output, and a node without effect."""
    nodes = [
        node("Constant", [], ["w"], "weight", value=numpy_helper.from_array(weights(4, 3))),
        node("Transpose", ["w"], ["wt"], "transpose"),
        node("Mul", ["wt", "half"], ["scaled"], "scale"),
        node("MatMul", ["x", "scaled"], ["y"], "product"),
        node("Size", ["y"], ["count"], "count"),
        node("Exp", ["y"], ["nothing"], "dead"),
        node("Identity", ["x"], ["same"], "same"),
    ]
    outputs = [("y", FLOAT, (2, 4)), ("count", INT64, ()), ("same", FLOAT, (2, 3))]
    return model_of(nodes, [("x", FLOAT, (2, 3))], outputs, {"half": np.float32(0.5)})


def shared_weight() -> onnx.ModelProto:
    """One initializer that two nodes use, like an embedding."""
    nodes = [
        node("Gather", ["table", "ids"], ["found"], "embed"),
        node("Transpose", ["table"], ["turned"], "turn"),
        node("MatMul", ["found", "turned"], ["logits"], "unembed"),
    ]
    return model_of(nodes, [("ids", INT64, (2, 3))], [("logits", FLOAT, (2, 3, 7))], {"table": weights(7, 4)})


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    maker.__name__: maker
    for maker in (
        residual_cnn, branches_and_loops, repeated, optional_and_split, lstm, sequences, constant_sequences,
        indices_of_nonzero,
        local_function, of_onnxruntime_alone, of_bfloat16, folded, shared_weight,
    )
}  # fmt: skip


def with_wrong_weight(model: Path, target: Path, weight: str) -> Path:
    """Copy a model and change a value of a weight."""
    proto = onnx.load(model)
    (tensor,) = (tensor for tensor in proto.graph.initializer if tensor.name == weight)
    values = numpy_helper.to_array(tensor).copy()
    values.reshape(-1)[values.size // 2] += 0.5
    tensor.CopyFrom(numpy_helper.from_array(values, weight))
    onnx.save(proto, target)
    return target
