"""Convert ONNX models to float16, or to int8 with onnxruntime.quantization. Runs in an isolated process."""

from __future__ import annotations

import graphlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hil.controller.models.importers.onnx import describe
from hil.controller.models.importers.onnx_data import embed_all
from hil.controller.models.importers.onnx_nodes import iter_nodes
from hil.controller.models.inputs import make_inputs
from hil.controller.models.onnx_files.rewrite_check import find_difference, run_plainly
from hil.controller.storage.screen.texts import line
from hil.controller.storage.tensor_files import load_tensors
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import TensorSpec
from hil.errors import ImportFailed
from hil.formats.onnx_file import iter_subgraphs, load_onnx


def to_float16(model: str, output: str, external: bool, samples: Sequence[str]) -> None:
    """Convert weights and arithmetic to float16. Inputs, outputs and operators without a float16 form stay unchanged.

    Raises:
        ImportFailed: the model has no float32, or the result is not a valid model.
    """
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    plain = _load_with_shapes(Path(model))
    before = _serialize_items(plain.graph)
    converted = convert_float_to_float16(plain, keep_io_types=True, disable_shape_infer=True)
    graph = converted.graph
    _sort_nodes(graph)
    if before == _serialize_items(graph):
        raise ImportFailed("the model has no float32 values to convert to float16")
    name = f"{Path(output).name}.data"
    onnx.save_model(converted, output, save_as_external_data=external, location=name)
    try:
        onnx.checker.check_model(output, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        text = line(str(error), 400)
        raise ImportFailed(f"the float16 model is invalid: {text}", detail=str(error)) from error


def _serialize_items(graph: Any) -> list[bytes]:
    return [item.SerializeToString(deterministic=True) for item in (*graph.node, *graph.initializer)]


def _load_with_shapes(path: Path) -> Any:
    """Load the model with all inferred shapes. If a model has shapes, the converter needs only types."""
    import onnx

    with make_temporary_folder("hil-float16-") as folder:
        inferred = Path(folder) / "inferred.onnx"
        # Use files: shape inference in memory fails for models above 2 GB.
        onnx.shape_inference.infer_shapes_path(path, inferred)
        model = load_onnx(inferred)
    embed_all(model, path.parent)
    return model


def _sort_nodes(graph: Any) -> None:
    """Sort the nodes and remove duplicates: the converter appends casts at the end, some of them twice."""
    nodes = list({tuple(node.output): node for node in graph.node}.values())
    makers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    taken = {
        index: {makers[name] for name in _iter_read_names(node) if name in makers} for index, node in enumerate(nodes)
    }
    order = list(graphlib.TopologicalSorter(taken).static_order())
    del graph.node[:]
    graph.node.extend(nodes[index] for index in order)


def _iter_read_names(node: Any) -> Iterator[str]:
    """Yield the names of values that a node reads: its inputs, and outer values that its subgraphs use."""
    yield from node.input
    for graph in iter_subgraphs(node):
        made = {name for inner in graph.node for name in inner.output}
        own = made | {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        names = {name for inner in graph.node for name in _iter_read_names(inner)}
        yield from sorted((names | {value.name for value in graph.output}) - own)


# Tolerance for prepared models. Preparation fuses operators, such as BatchNormalization into a Conv, which changes the
# rounding.
_FUSED_EPSILONS = 1 << 13

_QUANTISED = {
    "QuantizeLinear",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "DynamicQuantizeLSTM",
    "MatMulInteger",
    "ConvInteger",
}


def quantize_static(
    model: str,
    output: str,
    external: bool,
    samples: Sequence[str],
    per_channel: bool,
    reduce_range: bool,
    activations: str,
    method: str,
) -> None:
    """Quantise weights and activations to int8, in QDQ format, with activation ranges from samples.

    Args:
        model, output: file to read and file to write.
        external: store weights in a separate file.
        samples: directories with calibration samples.
        per_channel: use a scale per output channel of a weight instead of a scale per weight.
        reduce_range: use 7-bit weights, for x86 CPUs that saturate sums of two products (AVX2 without VNNI).
        activations: activation dtype, int8 or uint8.
        method: calibration method, minmax or percentile.

    Raises:
        ImportFailed: the model has no operators to quantise, or a setting is invalid.
    """
    from onnxruntime import quantization as ort

    class SampleReader(ort.CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types: its class is Any
        def __init__(self) -> None:
            self.folders = iter(samples)

        def get_next(self) -> Any:
            folder = next(self.folders, None)
            return None if folder is None else load_tensors(Path(folder))

    # Do not offer entropy: quantize_static uses as many bins as steps, which is equivalent to minmax.
    methods = {"minmax": ort.CalibrationMethod.MinMax, "percentile": ort.CalibrationMethod.Percentile}
    types = {"int8": ort.QuantType.QInt8, "uint8": ort.QuantType.QUInt8}
    _quantise_model(
        model,
        output,
        external,
        samples,
        ort.quantize_static,
        calibration_data_reader=SampleReader(),
        quant_format=ort.QuantFormat.QDQ,
        per_channel=per_channel,
        reduce_range=reduce_range,
        activation_type=_pick_setting("activations", activations, types),
        weight_type=ort.QuantType.QInt8,
        calibrate_method=_pick_setting("method", method, methods),
    )


def quantize_dynamic(
    model: str, output: str, external: bool, samples: Sequence[str], per_channel: bool, reduce_range: bool, weights: str
) -> None:
    """Quantise weights to int8. Activations are quantised at run time, by the current range of each tensor."""
    from onnxruntime import quantization as ort

    types = {"int8": ort.QuantType.QInt8, "uint8": ort.QuantType.QUInt8}
    _quantise_model(
        model,
        output,
        external,
        samples,
        ort.quantize_dynamic,
        per_channel=per_channel,
        reduce_range=reduce_range,
        weight_type=_pick_setting("weights", weights, types),
    )


def _quantise_model(
    model: str, output: str, external: bool, samples: Sequence[str], quantise: Callable[..., None], **settings: Any
) -> None:
    if before := _find_quantised_ops(model):
        raise ImportFailed(f"the model is already quantized: found {', '.join(sorted(before))}")
    with make_temporary_folder("hil-quantise-") as folder:
        prepared = Path(folder) / "prepared.onnx"
        _prepare_model(model, prepared, external)
        check_prepared(Path(model), prepared, samples)
        quantise(prepared, output, use_external_data_format=external, **settings)
    _drop_stale_shapes(output)
    if not _find_quantised_ops(output):
        operators = ", ".join(sorted(_list_operators(model)))
        raise ImportFailed(f"the model has no operators to quantize; operators: {operators}")


def _prepare_model(model: str, prepared: Path, external: bool) -> None:
    """Run the preprocessing that onnxruntime's documentation recommends.

    onnxruntime does not quantise tensors with unknown shapes.
    """
    from onnxruntime.quantization.shape_inference import quant_pre_process

    # Retry with fewer steps: symbolic inference does not support every operator, and optimisation may fail.
    tries = ((), ("skip_symbolic_shape",), ("skip_symbolic_shape", "skip_optimization"))
    for skipped in tries:
        options = {"save_as_external_data": external, "all_tensors_to_one_file": True, **dict.fromkeys(skipped, True)}
        try:
            quant_pre_process(model, prepared, **options)
        except Exception as error:
            if skipped == tries[-1]:
                raise
            print(f"preprocessing failed ({error}): retrying with fewer steps")
        else:
            return


def check_prepared(model: Path, prepared: Path, samples: Sequence[str]) -> None:
    """Raise ImportFailed if preprocessing changed the model's results. Quantisation itself changes them intentionally.

    Both models run on the first sample, or on random inputs if there are no samples and all shapes are static.
    """
    if samples:
        given = load_tensors(Path(samples[0]))
    else:
        found = describe(str(model), "", {})
        specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in found["inputs"]]
        if not all(spec.is_static for spec in specs):
            return
        given = make_inputs(specs, {}, ranges=found["ranges"])
    before, after = (run_plainly(str(file), file.parent, given) for file in (model, prepared))
    if before is not None and after is not None and (change := find_difference(before, after, _FUSED_EPSILONS)):
        raise ImportFailed(f"onnxruntime.quantization.quant_pre_process changed {change}")


def _drop_stale_shapes(path: str) -> None:
    """Remove the stored shapes of deleted tensors and of outputs.

    The quantiser copies the shapes of the original model. Their symbols would contradict sizes that are set later.
    """
    import onnx

    read = load_onnx(path)
    made = {name for node in read.graph.node for name in node.output} - {value.name for value in read.graph.output}
    kept = [value for value in read.graph.value_info if value.name in made]
    del read.graph.value_info[:]
    read.graph.value_info.extend(kept)
    onnx.save(read, path)


def _find_quantised_ops(path: str) -> set[str]:
    """Return the operators that only quantised models have."""
    return _list_operators(path) & _QUANTISED


def _list_operators(path: str) -> set[str]:

    return {node.op_type for node in iter_nodes(load_onnx(path).graph.node)}


def _pick_setting(setting: str, value: str, known: dict[str, Any]) -> Any:
    if value not in known:
        raise ImportFailed(f"invalid value {value!r} for setting {setting}", hint=f"expected one of {', '.join(known)}")
    return known[value]
