"""Write models of the sizes that run on microcontrollers, with random weights.

The four models have the shapes of MLPerf Tiny's reference models (https://github.com/mlcommons/tiny), with batch
normalization folded into the convolutions. `decoder_step` computes one token of a small language model. With --int8
the models are also written as int8 (QDQ), with ranges calibrated on random inputs.

    python examples/microcontrollers/make.py --out DIR [--int8] [NAME...]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
CALIBRATION_INPUTS = 8


class Builder:
    """Model of one chain of nodes, with random weights."""

    def __init__(self, name: str, shape: list[int]) -> None:
        self.name = name
        self.rng = np.random.default_rng(7)
        self.inputs = [helper.make_tensor_value_info("input", TensorProto.FLOAT, shape)]
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def add(self, kind: str, inputs: list[str], name: str, **attributes: object) -> str:
        """Add a node, and return its output."""
        self.nodes.append(helper.make_node(kind, inputs, [f"{name}_out"], name, **attributes))
        return f"{name}_out"

    def weight(self, name: str, shape: list[int], fan_in: int) -> str:
        """Add random weights that keep the scale of activations."""
        values = self.rng.normal(0, (2 / fan_in) ** 0.5 if fan_in else 0.05, shape)
        self.weights.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def convolve(
        self,
        x: str,
        name: str,
        given: int,
        made: int,
        kernel: tuple[int, int],
        size: tuple[int, int],
        stride: int = 1,
        group: int = 1,
        activate: bool = True,
    ) -> tuple[str, tuple[int, int]]:
        """Add a convolution with padding as TensorFlow's SAME. Return the output, and its height and width."""
        per_group = given // group
        weight = self.weight(f"{name}_weight", [made, per_group, *kernel], per_group * kernel[0] * kernel[1])
        bias = self.weight(f"{name}_bias", [made], 0)
        out = tuple(-(-side // stride) for side in size)
        total = [max(0, (o - 1) * stride + k - side) for o, k, side in zip(out, kernel, size, strict=True)]
        pads = [each // 2 for each in total] + [each - each // 2 for each in total]
        y = self.add("Conv", [x, weight, bias], name, pads=pads, strides=[stride] * 2, group=group)
        return (self.add("Relu", [y], f"{name}_relu") if activate else y), (out[0], out[1])

    def connect(self, x: str, name: str, given: int, made: int) -> str:
        """Add a fully connected layer."""
        weight, bias = self.weight(f"{name}_weight", [given, made], given), self.weight(f"{name}_bias", [made], 0)
        return self.add("Gemm", [x, weight, bias], name)

    def finish(self, outputs: dict[str, list[int]]) -> onnx.ModelProto:
        """Return the model. ``outputs`` are values of the chain, with their shapes."""
        infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
        graph = helper.make_graph(self.nodes, self.name, self.inputs, infos, self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
        onnx.checker.check_model(model)
        return model


def make_resnet8() -> onnx.ModelProto:
    """Return the image classifier: 3x32x32, three residual stacks, 10 classes."""
    build = Builder("resnet8", [1, 3, 32, 32])
    x, size = build.convolve("input", "stem", 3, 16, (3, 3), (32, 32))
    for place, (given, made, stride) in enumerate([(16, 16, 1), (16, 32, 2), (32, 64, 2)]):
        y, next_size = build.convolve(x, f"stack{place}_a", given, made, (3, 3), size, stride)
        y, _ = build.convolve(y, f"stack{place}_b", made, made, (3, 3), next_size, activate=False)
        if stride > 1:
            x, _ = build.convolve(x, f"stack{place}_skip", given, made, (1, 1), size, stride, activate=False)
        x = build.add("Relu", [build.add("Add", [x, y], f"stack{place}_add")], f"stack{place}_relu")
        size = next_size
    x = build.add("Flatten", [build.add("GlobalAveragePool", [x], "pool")], "flatten")
    return build.finish({build.add("Softmax", [build.connect(x, "dense", 64, 10)], "softmax"): [1, 10]})


def make_ds_cnn() -> onnx.ModelProto:
    """Return the keyword spotter: 1x49x10, four depthwise-separable blocks, 12 classes."""
    build = Builder("ds_cnn", [1, 1, 49, 10])
    x, size = build.convolve("input", "stem", 1, 64, (10, 4), (49, 10), 2)
    for place in range(4):
        x, _ = build.convolve(x, f"depthwise{place}", 64, 64, (3, 3), size, group=64)
        x, _ = build.convolve(x, f"pointwise{place}", 64, 64, (1, 1), size)
    x = build.add("Flatten", [build.add("GlobalAveragePool", [x], "pool")], "flatten")
    return build.finish({build.add("Softmax", [build.connect(x, "dense", 64, 12)], "softmax"): [1, 12]})


def make_mobilenet() -> onnx.ModelProto:
    """Return the person detector: MobileNetV1 with a width of 0.25, 3x96x96, 2 classes."""
    build = Builder("mobilenet", [1, 3, 96, 96])
    x, size = build.convolve("input", "stem", 3, 8, (3, 3), (96, 96), 2)
    given = 8
    blocks = [(16, 1), (32, 2), (32, 1), (64, 2), (64, 1), (128, 2), *[(128, 1)] * 5, (256, 2), (256, 1)]
    for place, (made, stride) in enumerate(blocks):
        x, size = build.convolve(x, f"depthwise{place}", given, given, (3, 3), size, stride, group=given)
        x, size = build.convolve(x, f"pointwise{place}", given, made, (1, 1), size)
        given = made
    x = build.add("Flatten", [build.add("GlobalAveragePool", [x], "pool")], "flatten")
    return build.finish({build.add("Softmax", [build.connect(x, "dense", 256, 2)], "softmax"): [1, 2]})


def make_autoencoder() -> onnx.ModelProto:
    """Return the anomaly detector: fully connected, 640-128x4-8-128x4-640."""
    build = Builder("autoencoder", [1, 640])
    x, given = "input", 640
    sizes = [*[128] * 4, 8, *[128] * 4, 640]
    for place, made in enumerate(sizes):
        x = build.connect(x, f"dense{place}", given, made)
        if place < len(sizes) - 1:
            x = build.add("Relu", [x], f"relu{place}")
        given = made
    return build.finish({x: [1, 640]})


def make_decoder_step() -> onnx.ModelProto:
    """Return a step of a decoder with one layer, 4 heads of 16, and a cache of 32 entries. `past` has the first 31."""
    heads, head, past = 4, 16, 31
    width = heads * head
    build = Builder("decoder_step", [1, width])
    for name in ("past_keys", "past_values"):
        build.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [heads, past, head]))
    build.weights += [
        numpy_helper.from_array(np.array([heads, 1, head]), "head_shape"),
        numpy_helper.from_array(np.array([1, width]), "row_shape"),
        numpy_helper.from_array(np.float32(head**-0.5), "scale"),
    ]

    def split(name: str) -> str:
        return build.add("Reshape", [build.connect("input", name, width, width), "head_shape"], f"{name}_heads")

    query = build.add("Mul", [split("query"), "scale"], "query_scaled")
    keys = build.add("Concat", ["past_keys", split("key")], "keys", axis=1)
    values = build.add("Concat", ["past_values", split("value")], "values", axis=1)
    scores = build.add("MatMul", [query, build.add("Transpose", [keys], "turned", perm=[0, 2, 1])], "scores")
    mixed = build.add("MatMul", [build.add("Softmax", [scores], "shares", axis=-1), values], "mixed")
    row = build.add("Reshape", [mixed, "row_shape"], "row")
    x = build.add("Add", ["input", build.connect(row, "attention", width, width)], "after_attention")
    y = build.add("Relu", [build.connect(x, "up", width, 4 * width)], "activation")
    x = build.add("Add", [x, build.connect(y, "down", 4 * width, width)], "after_network")
    return build.finish(
        {build.connect(x, "head", width, 256): [1, 256], keys: [heads, past + 1, head], values: [heads, past + 1, head]}
    )


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "resnet8": make_resnet8,
    "ds_cnn": make_ds_cnn,
    "mobilenet": make_mobilenet,
    "autoencoder": make_autoencoder,
    "decoder_step": make_decoder_step,
}


def quantize(model: onnx.ModelProto, path: Path) -> None:
    """Write a model as int8, its ranges calibrated on random inputs."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    shapes = {one.name: [dim.dim_value for dim in one.type.tensor_type.shape.dim] for one in model.graph.input}
    rng = np.random.default_rng(8)

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = CALIBRATION_INPUTS

        def get_next(self) -> dict[str, np.ndarray] | None:
            self.left -= 1
            if self.left < 0:
                return None
            return {name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}

    quantize_static(
        model,
        path,
        Reader(),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
        reduce_range=True,  # weights of 7 bits: ONNX Runtime saturates on x86 CPUs without VNNI
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(MODELS)}")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="default: the current directory")
    parser.add_argument("--int8", action="store_true", help="also write the models as int8")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in MODELS]:
        parser.error(f"unknown model {unknown[0]!r}: expected one of {', '.join(MODELS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or MODELS:
        model = MODELS[name]()
        onnx.save(model, arguments.out / f"{name}.onnx")
        if arguments.int8:
            quantize(model, arguments.out / f"{name}_int8.onnx")


if __name__ == "__main__":
    main()
