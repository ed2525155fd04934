"""Train the digits CNN from nothing and write everything in this folder anew: `python examples/digits/train.py`.

Forward and backward pass are written out in numpy, so the training needs no framework. Layout is NCHW throughout.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
from numpy.lib.stride_tricks import sliding_window_view
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits

SEED = 0
TEST_IMAGES = 64  # written to digits_test.npz
HELD_OUT = 360  # never trained or calibrated on; the test images are the first of them
EPOCHS = 60
BATCH = 32
LEARNING_RATE = 2e-3
PEAK_PIXEL = 16.0  # load_digits counts set pixels in 4x4 blocks

Params = dict[str, np.ndarray]


def load() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The data, shuffled and split: training images [n, 1, 8, 8] in 0..1 and labels, then the held-out ones."""
    digits = load_digits()
    order = np.random.default_rng(SEED).permutation(len(digits.target))
    images = (digits.images[order, None] / PEAK_PIXEL).astype(np.float32)
    labels = digits.target[order].astype(np.int64)
    return images[HELD_OUT:], labels[HELD_OUT:], images[:HELD_OUT], labels[:HELD_OUT]


def initial(rng: np.random.Generator) -> Params:
    """He's initialisation (He et al. 2015): normal with variance 2 / fan-in."""

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))).astype(np.float32)

    zeros = {f"{name}.bias": np.zeros(size, np.float32) for name, size in (("conv1", 16), ("conv2", 32), ("fc1", 10))}
    return {
        "conv1.weight": normal(16, 1, 3, 3),
        "conv2.weight": normal(32, 16, 3, 3),
        "fc1.weight": normal(10, 128),
        **zeros,
    }


def conv(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A 3x3 convolution with padding 1; also the patches [n, c, h, w, 3, 3] that its backward pass needs."""
    patches = sliding_window_view(np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), axis=(2, 3))
    out = np.tensordot(patches, weight, ((1, 4, 5), (1, 2, 3)))  # [n, h, w, out]
    return np.moveaxis(out, 3, 1) + bias[:, None, None], patches


def conv_backward(
    grad: np.ndarray, patches: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of the input, the weight and the bias. The input's is the convolution with the turned kernel."""
    turned = weight[:, :, ::-1, ::-1].swapaxes(0, 1)
    to_input, _ = conv(grad, turned, np.zeros(len(turned), np.float32))
    return to_input, np.tensordot(grad, patches, ((0, 2, 3), (0, 2, 3))), grad.sum((0, 2, 3))


def pool(x: np.ndarray) -> np.ndarray:
    """Maximum over 2x2 blocks."""
    n, c, h, w = x.shape
    return x.reshape(n, c, h // 2, 2, w // 2, 2).max((3, 5))


def pool_backward(grad: np.ndarray, x: np.ndarray, out: np.ndarray) -> np.ndarray:
    """The gradient goes to the maximum of each block, in equal parts where several are equal."""

    def spread(a: np.ndarray) -> np.ndarray:
        return a.repeat(2, 2).repeat(2, 3)

    winners = (x == spread(out)).astype(np.float32)
    share = winners.reshape(*out.shape[:3], 2, out.shape[3], 2).sum((3, 5))
    return winners * spread(grad / share)


def forward(params: Params, x: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The logits [n, 10], and what the backward pass needs."""
    a: dict[str, np.ndarray] = {}
    conv1, a["patches1"] = conv(x, params["conv1.weight"], params["conv1.bias"])
    a["relu1"] = np.maximum(conv1, 0)
    a["pool1"] = pool(a["relu1"])
    conv2, a["patches2"] = conv(a["pool1"], params["conv2.weight"], params["conv2.bias"])
    a["relu2"] = np.maximum(conv2, 0)
    a["pool2"] = pool(a["relu2"])
    return a["pool2"].reshape(len(x), -1) @ params["fc1.weight"].T + params["fc1.bias"], a


def gradients(params: Params, x: np.ndarray, labels: np.ndarray) -> Params:
    """Gradients of the mean cross-entropy."""
    logits, a = forward(params, x)
    exp = np.exp(logits - logits.max(1, keepdims=True))
    grad = exp / exp.sum(1, keepdims=True)
    grad[np.arange(len(x)), labels] -= 1
    grad /= len(x)
    g = {"fc1.weight": grad.T @ a["pool2"].reshape(len(x), -1), "fc1.bias": grad.sum(0)}
    grad = (grad @ params["fc1.weight"]).reshape(a["pool2"].shape)
    grad = pool_backward(grad, a["relu2"], a["pool2"]) * (a["relu2"] > 0)
    grad, g["conv2.weight"], g["conv2.bias"] = conv_backward(grad, a["patches2"], params["conv2.weight"])
    grad = pool_backward(grad, a["relu1"], a["pool1"]) * (a["relu1"] > 0)
    _, g["conv1.weight"], g["conv1.bias"] = conv_backward(grad, a["patches1"], params["conv1.weight"])
    return g


def train(images: np.ndarray, labels: np.ndarray) -> Params:
    """Adam (Kingma and Ba 2015) with the learning rate falling to zero along half a cosine."""
    rng = np.random.default_rng(SEED)
    params = initial(rng)
    mean = {name: np.zeros_like(p) for name, p in params.items()}
    square = {name: np.zeros_like(p) for name, p in params.items()}
    steps = EPOCHS * (len(images) // BATCH)
    step = 0
    for _ in range(EPOCHS):
        order = rng.permutation(len(images))
        for at in range(0, len(images) - BATCH + 1, BATCH):
            step += 1
            rate = LEARNING_RATE * (1 + np.cos(np.pi * step / steps)) / 2
            pick = order[at : at + BATCH]
            for name, g in gradients(params, images[pick], labels[pick]).items():
                mean[name] = 0.9 * mean[name] + 0.1 * g
                square[name] = 0.999 * square[name] + 0.001 * g * g
                slope = mean[name] / (1 - 0.9**step) / (np.sqrt(square[name] / (1 - 0.999**step)) + 1e-8)
                params[name] = (params[name] - rate * slope).astype(np.float32)
    return params


def export(params: Params, batch: int | str) -> onnx.ModelProto:
    """The network as ONNX: input `image` [batch, 1, 8, 8], output `logits` [batch, 10]."""
    nodes = [
        helper.make_node("Conv", ["image", "conv1.weight", "conv1.bias"], ["conv1.out"], "conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["conv1.out"], ["relu1.out"], "relu1"),
        helper.make_node("MaxPool", ["relu1.out"], ["pool1.out"], "pool1", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node(
            "Conv", ["pool1.out", "conv2.weight", "conv2.bias"], ["conv2.out"], "conv2", pads=[1, 1, 1, 1]
        ),
        helper.make_node("Relu", ["conv2.out"], ["relu2.out"], "relu2"),
        helper.make_node("MaxPool", ["relu2.out"], ["pool2.out"], "pool2", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["pool2.out"], ["flatten.out"], "flatten", axis=1),
        helper.make_node("Gemm", ["flatten.out", "fc1.weight", "fc1.bias"], ["logits"], "fc1", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "digits_cnn",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [batch, 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, 10])],
        [numpy_helper.from_array(value, name) for name, value in params.items()],
    )
    opset = helper.make_opsetid("", 17)
    model = helper.make_model(graph, producer_name="hil examples/digits", opset_imports=[opset], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def quantize(model: onnx.ModelProto, images: np.ndarray, path: Path) -> None:
    """Write the model as int8 QDQ, its ranges calibrated on these images."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.images = iter(images)

        def get_next(self) -> dict[str, np.ndarray] | None:
            image = next(self.images, None)
            return None if image is None else {"image": image[None]}

    quantize_static(
        model,
        path,
        Reader(),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
        reduce_range=True,  # weights of 7 bits: right also on x86 CPUs without VNNI, where ONNX Runtime saturates
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, metavar="DIR", help="default: this directory"
    )
    out = parser.parse_args().out
    images, labels, held_images, held_labels = load()
    params = train(images, labels)
    accuracy = (forward(params, held_images)[0].argmax(1) == held_labels).mean()
    print(f"accuracy on {len(held_labels)} held-out images: {accuracy:.4f}")
    model = export(params, 1)
    onnx.save(model, out / "digits_cnn.onnx")
    onnx.save(export(params, "N"), out / "digits_cnn_batch.onnx")
    quantize(model, images[:256], out / "digits_cnn_int8.onnx")
    np.savez_compressed(out / "digits_test.npz", image=held_images[:TEST_IMAGES], label=held_labels[:TEST_IMAGES])


if __name__ == "__main__":
    main()
