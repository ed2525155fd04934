"""Measure an inference of a MobileNetV2-sized model with the agent, relative to the same program in this process.

This module builds the model (224x224, MobileNetV2's convolutions, seeded weights). `hil compile` compiles it with the
simulated board's flags. The result is the wall time of a whole call: send the image, run once, fetch the scores. The
rival runs the same .vmfb with iree.runtime in this process, on the same driver: copy the image to the device, invoke,
copy the scores back.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import iree.runtime as rt
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks import common

DEVICE = "local-task"
# MobileNetV2 (Sandler et al., 2018), table 2: expansion, channels, repeats, stride.
BLOCKS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class Builder:
    """Builder that collects a network's nodes and seeded weights."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(0)

    def node(self, op: str, inputs: list[str], **attributes: object) -> str:
        """Add a node. Return the name of its output."""
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def add_weight(self, array: np.ndarray) -> str:
        """Add a weight. Return its name."""
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def conv(self, x: str, shape: tuple[int, int, int], stride: int = 1, groups: int = 1, relu: bool = True) -> str:
        """Add a convolution of shape (in, out, kernel) with a bias, and optionally ReLU6."""
        into, out, kernel = shape
        fan_in = into // groups * kernel * kernel
        scale = np.sqrt(2 / fan_in)
        weight = self._rng.standard_normal((out, into // groups, kernel, kernel), dtype=np.float32) * np.float32(scale)
        inputs = [x, self.add_weight(weight), self.add_weight(np.zeros(out, np.float32))]
        x = self.node("Conv", inputs, strides=[stride] * 2, pads=[kernel // 2] * 4, group=groups)
        if not relu:
            return x
        return self.node("Clip", [x, self.add_weight(np.float32(0)), self.add_weight(np.float32(6))])


def mobilenet(path: Path) -> Path:
    """Write the model. The input is an image [1, 3, 224, 224], the output scores [1, 1000], float32."""
    build = Builder()
    x = build.conv("image", (3, 32, 3), stride=2)
    channels = 32
    for expansion, out, repeats, first_stride in BLOCKS:
        for turn in range(repeats):
            stride = first_stride if turn == 0 else 1
            inner = channels * expansion
            y = build.conv(x, (channels, inner, 1)) if expansion > 1 else x
            y = build.conv(y, (inner, inner, 3), stride, groups=inner)
            y = build.conv(y, (inner, out, 1), relu=False)
            x = build.node("Add", [x, y]) if stride == 1 and channels == out else y
            channels = out
    x = build.node("Flatten", [build.node("GlobalAveragePool", [build.conv(x, (320, 1280, 1))])])
    rng = np.random.default_rng(1)
    dense = build.add_weight(rng.standard_normal((1280, 1000), dtype=np.float32) * np.float32(0.03))
    build.nodes.append(helper.make_node("MatMul", [x, dense], ["scores"], name="scores"))
    given = helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, 224, 224])
    made = helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, 1000])
    graph = helper.make_graph(build.nodes, "mobilenet", [given], [made], build.weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


class InProcess:
    """Program in this process, with the same calls as in the agent's worker."""

    def __init__(self, path: Path) -> None:
        self._instance = rt.VmInstance()
        self._device = rt.get_device(DEVICE, cache=False)
        hal = rt.create_hal_module(self._instance, self._device)
        module = rt.VmModule.mmap(self._instance, str(path))
        self._context = rt.VmContext(self._instance, [hal, module])
        names = [name for name in module.function_names if not name.startswith("__") and "$" not in name]
        self._function = module.lookup_function(names[0])

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """Return the scores of an image."""
        memory = int(rt.MemoryType.DEVICE_LOCAL | rt.MemoryType.HOST_VISIBLE)
        usage = int(rt.BufferUsage.DEFAULT | rt.BufferUsage.MAPPING)
        buffer = self._device.allocator.allocate_buffer_copy(
            memory_type=memory, allowed_usage=usage, device=self._device, buffer=image
        )
        arguments = rt.VmVariantList(1)
        arguments.push_ref(rt.HalBufferView(buffer, list(image.shape), rt.HalElementType.FLOAT_32))
        results = rt.VmVariantList(1)
        self._context.invoke(self._function, arguments, results)
        view = results.get_as_object(0, rt.HalBufferView)
        return np.frombuffer(view.map(), np.float32).copy()


def main() -> None:
    """Measure and print."""
    asked = common.options(__doc__, rounds=25, calls=8)
    image = np.random.default_rng(2).random((1, 3, 224, 224), dtype=np.float32)
    device_ns: list[int] = []
    with common.session() as (client, _, folder):
        source, program = mobilenet(folder / "mobilenet.onnx"), folder / "mobilenet.vmfb"
        arguments = ["compile", str(source), "--runtime-hw-type", "sim", "-o", str(program)]
        subprocess.run([sys.executable, "-m", "hil.controller.cli.main", *arguments], check=True, stdout=sys.stderr)
        loaded = common.load(client, program, device=DEVICE)
        local = InProcess(program)
        name = loaded.inputs[0].name

        def invoke() -> np.ndarray:
            done = client.invoke(loaded.program_id, {name: image})
            device_ns.extend(end - start for start, end in done.iterations_ns)
            return next(iter(done.outputs.values()))

        assert np.array_equal(invoke().reshape(-1), local(image))
        cases = {
            "hil": lambda: common.timed(invoke, asked.calls),
            "local": lambda: common.timed(lambda: local(image), asked.calls),
        }
        got = common.interleave(cases, asked.rounds)
    case = "MobileNetV2-sized, 224x224, one inference"
    rows = [common.beside(case, got["hil"], "in process", got["local"], 1e3, "ms", "<= 1.03")]
    rows.append(common.Row("of it on the device", statistics.median(device_ns) / 1e6, "ms"))
    notes = ["each figure is the median over rounds of a round's median; both give bit-equal scores"]
    common.show("model", rows, notes, as_json=asked.json)


if __name__ == "__main__":
    main()
