"""Run ONNX node tests with the vendors' tools, without hil's pipeline.

Tests run in separate processes. A result has ``end`` ("ran", or the failed step: "import", "compile", "load", "run"),
``crashed``, ``message``, and ``outputs``, a list of [dtype, shape or None, bytes' digest].
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import subprocess
import sysconfig
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.storage.tensor_files import load_tensors
from hil.core.npy import load_npy
from hil.core.tensors import NUMPY_DTYPES, SUB_BYTE_BITS, Array, get_dtype_name, pack, parse_dtype, to_bytes, unpack
from hil.formats.ort_values import ONNX_TYPES

MODEL = "model.onnx"
INPUTS = "inputs"
STEP_TIMEOUT_SECONDS = 300.0
_MLIR = {
    "bool": "i1", "bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "float8_e4m3fn": "f8E4M3FN",
    "float8_e4m3fnuz": "f8E4M3FNUZ", "float8_e5m2": "f8E5M2", "float8_e5m2fnuz": "f8E5M2FNUZ",
    "float8_e8m0fnu": "f8E8M0FNU",
}  # fmt: skip


@dataclass(frozen=True)
class Test:
    """Node test of the onnx package: a model and a data set."""

    id: str
    model: Any
    inputs: Mapping[str, Array]
    outputs: tuple[str, ...]


def read_node_tests() -> dict[str, Test]:
    """Read all node tests and data sets of the installed onnx: case name in hil's suite -> test."""
    from onnx import TensorProto, numpy_helper
    from onnx.backend.test.loader import load_model_tests

    names = {number: name for name, number in ONNX_TYPES.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # onnx divides by zero on purpose
        loaded: list[Any] = load_model_tests(kind="node")
    found = {}
    for test in loaded:
        outputs = tuple(names.get(one.type.tensor_type.elem_type, "") for one in test.model.graph.output)
        for number, (inputs, _) in enumerate(test.data_sets):
            case = test.name.removeprefix("test_") + (f".{number}" if len(test.data_sets) > 1 else "")
            arrays = {}
            for info, value in zip(test.model.graph.input, inputs, strict=False):
                if isinstance(value, TensorProto):
                    value = numpy_helper.to_array(value)
                if isinstance(value, (np.ndarray, np.generic)):
                    arrays[info.name] = np.asarray(value)
            found[case] = Test(case, test.model, arrays, outputs)
    return found


def run_onnxruntime(folder: str) -> dict[str, Any]:
    """Run a model once in a plain InferenceSession on the CPU with default settings.

    Args:
        folder: contains ``model.onnx`` and the tensors in ``inputs``.
    """
    import onnxruntime as ort

    from hil.formats.ort_values import copy_from_ort, make_node_spec, to_ort

    ort.set_default_logger_severity(4)
    try:
        session = ort.InferenceSession(str(Path(folder) / MODEL), providers=["CPUExecutionProvider"])
    except Exception as error:
        return _end("load", error)
    inputs = load_tensors(Path(folder) / INPUTS)
    specs = [make_node_spec(node) for node in session.get_outputs()]
    try:
        if all(array.dtype.name in NUMPY_DTYPES or array.dtype.kind == "O" for array in inputs.values()) and all(
            spec is None or spec.dtype in (*NUMPY_DTYPES, "string") for spec in specs
        ):
            return _make_result([np.asarray(value) for value in session.run(None, inputs)])
        # Pass the tensors as OrtValues, because numpy lacks some dtypes.
        values = session.run_with_ort_values(None, {name: to_ort(array) for name, array in inputs.items()})
        return _make_result(
            [copy_from_ort(value, spec.dtype) for value, spec in zip(values, specs, strict=True) if spec]
        )
    except Exception as error:
        return _end("run", error)


def run_iree(folder: str, flags: Sequence[str], device: str, opset: int, outputs: Sequence[str]) -> dict[str, Any]:
    """Run ``iree-import-onnx``, ``iree-compile`` and ``iree-run-module``.

    Args:
        folder: contains ``model.onnx`` and the tensors in ``inputs``.
        flags: flags of iree-compile.
        device: device of iree-run-module.
        opset: value of ``iree-import-onnx --opset-version``; 0 omits the option.
        outputs: dtypes of the outputs, in order.
    """
    from iree.compiler.tools.import_onnx.__main__ import main, parse_arguments

    program = Path(folder) / f"plain{opset}.mlir"
    arguments = [str(Path(folder) / MODEL), "-o", str(program), *(["--opset-version", str(opset)] if opset else [])]
    try:
        # Call the command's main function, which saves Python's start-up time.
        with contextlib.redirect_stdout(io.StringIO()):
            main(parse_arguments(arguments))
    except (Exception, SystemExit) as error:
        return _end("import", error)
    return _compile_and_run(Path(folder), program, flags, device, outputs)


def run_iree_repeatedly(folder: str, device: str) -> dict[str, Any]:
    """Call the program of :func:`run_iree` repeatedly with IREE's Python API, and use memory between the calls.

    Returns:
        ``answers``: the number of different results. It exceeds 1 if the program reads memory outside of its tensors.
    """
    import iree.runtime as rt

    instance, hal_device = rt.VmInstance(), rt.get_device(device)
    module = rt.VmModule.mmap(instance, str(Path(folder) / "plain0.vmfb"))
    context = rt.VmContext(instance, [rt.create_hal_module(instance, hal_device), module])
    function = rt.FunctionInvoker(context, hal_device, module.lookup_function(_read_function(Path(folder))))
    inputs = list(load_tensors(Path(folder) / INPUTS).values())
    answers = set()
    for fill in (0.0, 1e20, -3.0, 1e-20, 7e5, 1.0):
        used = [np.full(1 << power, fill, np.float32) for power in range(4, 14) for _ in range(30)]
        used.clear()
        given = [rt.asdevicearray(hal_device, array) for array in inputs]
        results = function(*given)
        results = results if isinstance(results, (list, tuple)) else [results]
        answers.add(tuple(digest(np.asarray(one.to_host())) for one in results))
    return {"answers": len(answers)}


def digest(array: Array) -> str:
    """Return a SHA-256 digest of an array's bytes."""
    return hashlib.sha256(to_bytes(array)).hexdigest()


def describe_arrays(arrays: Sequence[Array]) -> list[list[Any]]:
    """Return [dtype, shape, digest] of the arrays."""
    return [[get_dtype_name(array.dtype), list(array.shape), digest(array)] for array in arrays]


def _compile_and_run(
    folder: Path, program: Path, flags: Sequence[str], device: str, outputs: Sequence[str]
) -> dict[str, Any]:
    module = program.with_suffix(".vmfb")
    done = run_command([find_tool("iree-compile"), program, "-o", module, *flags])
    if done["code"]:
        # Exit code 1 is an error. Other codes and signals are crashes.
        return {**_end("compile", done["said"]), "crashed": done["code"] != 1}
    files = [folder / f"{program.stem}-{n}.{'npy' if one in NUMPY_DTYPES else 'bin'}" for n, one in enumerate(outputs)]
    command = [
        find_tool("iree-run-module"),
        f"--module={module}",
        f"--device={device}",
        f"--function={_read_function(folder)}",
    ]
    try:
        command += [f"--input={text}" for text in _make_arguments(folder)]
    except KeyError as error:
        return _end("run", f"iree-run-module does not support {error} tensors")
    done = run_command([*command, *(f"--output=@{file}" for file in files)])
    if done["code"]:
        return {**_end("run", done["said"]), "crashed": done["code"] < 0}
    return {"end": "ran", "crashed": False, "message": "", "outputs": list(map(_read, files, outputs))}


def _read_function(folder: Path) -> str:
    import onnx

    return onnx.load(folder / MODEL).graph.name


def _make_arguments(folder: Path) -> list[str]:
    texts = []
    for number, array in enumerate(load_tensors(folder / INPUTS).values()):
        name = get_dtype_name(array.dtype)
        file = folder / f"input-{number}.{'npy' if array.dtype.kind == 'c' else 'bin'}"
        if array.dtype.kind == "c":
            np.save(file, array)
            texts.append(f"@{file}")
            continue
        file.write_bytes(pack(array).data if name in SUB_BYTE_BITS else to_bytes(array))
        kind = _MLIR.get(name) or (name[0].replace("u", "ui") + name.split("int")[1] if "int" in name else _MLIR[name])
        texts.append("".join(f"{dim}x" for dim in array.shape) + f"{kind}=@{file}")
    return texts


def _read(file: Path, dtype: str) -> list[Any]:
    """Return [dtype, shape, digest] of an output file. The shape is None for a .bin file."""
    if file.suffix == ".npy":
        array = load_npy(file)
        signless = array.dtype.kind in "iu" and parse_dtype(dtype).kind in "iu"
        return describe_arrays([array.view(parse_dtype(dtype)) if signless else array])[0]
    raw = np.frombuffer(file.read_bytes(), np.uint8)
    if dtype in SUB_BYTE_BITS:
        raw = unpack(raw, dtype, [raw.size * 8 // SUB_BYTE_BITS[dtype]]).view(np.uint8)
    return [dtype, None, digest(raw)]


def _make_result(arrays: Sequence[Array]) -> dict[str, Any]:
    return {"end": "ran", "crashed": False, "message": "", "outputs": describe_arrays(arrays)}


def _end(step: str, error: object) -> dict[str, Any]:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return {"end": step, "crashed": False, "message": lines[0][:300] if lines else repr(error), "outputs": []}


def run_command(command: Sequence[object]) -> dict[str, Any]:
    """Run a command. Return the exit code (124 after a timeout) and stderr."""
    try:
        done = subprocess.run(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=STEP_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"code": 124, "said": f"timed out after {STEP_TIMEOUT_SECONDS:g} s"}
    return {"code": done.returncode, "said": done.stderr.decode(errors="replace")}


def find_tool(name: str) -> str:
    """Return the path of a command in this environment."""
    return str(Path(sysconfig.get_path("scripts")) / name)
