"""Convert TensorFlow models to StableHLO for IREE, and to TFLite. Runs in an isolated process."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.models.compiling import find_native_compiler, report_phase
from hil.controller.models.conversions.batch_norm import expand_batch_norm_grad
from hil.controller.models.conversions.loops import INLINE, unroll_loops
from hil.controller.models.importers.mlir import find_operations, get_function
from hil.controller.models.tensorflow.graphs import format_converter_error, format_error
from hil.controller.models.tensorflow.lower import ENTRY, LoweredFunction, lower_function
from hil.controller.models.tensorflow.source import name_outputs, open_model
from hil.controller.storage.screen.texts import convert_foreign_errors
from hil.core.files import MAX_MODEL_BYTES, read_file
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import Array, TensorSpec
from hil.errors import CompileFailed
from hil.formats.iree_values import format_mlir_type


def to_mlir(path: str, function: str, output: str, dims: Mapping[str, int]) -> None:
    """Write a function of a model as StableHLO, in MLIR bytecode. Every call starts with the saved variables.

    The outputs are followed by the new values of assigned variables.
    """
    source = open_model(path, function, dims)

    def call_flat(*tensors: object) -> object:
        return source.call(list(tensors))

    report_phase("lower to StableHLO")
    live = lower_function(call_flat, source.list_sized_inputs())
    report_phase("freeze the variables")
    Path(output).write_bytes(freeze(live.function, live.values(), function, list(source.assigned)))


def to_tflite(path: str, function: str, output: str, dims: Mapping[str, int]) -> None:
    """Write a function of a model as a TFLite file with one signature. Dimensions may stay dynamic."""
    import tensorflow as tf

    source = open_model(path, function, dims)
    if source.assigned:
        raise CompileFailed(
            f"TFLite programs do not return updated variables: {', '.join(list(source.assigned)[:4])}",
            hint="use the runtime iree or xla-aot, which return updated variables",
        )
    # TFLite sorts the names of a signature. Names with numbers keep hil's order.
    specs = [tf.TensorSpec(spec.shape, spec.dtype, f"input{number:03}") for number, spec in enumerate(source.specs)]

    def call_flat(*tensors: object) -> dict[str, object]:
        results = name_outputs(source.call(list(tensors)))
        return {f"output{number:03}": tf.identity(leaf) for number, (_, leaf) in enumerate(results)}

    report_phase("trace")
    with convert_foreign_errors(CompileFailed, f"TensorFlow cannot trace {source.name}", error_text=format_error):
        concrete = tf.function(call_flat, autograph=False).get_concrete_function(*specs)
    report_phase("TFLite converter")
    Path(output).write_bytes(convert(concrete, source.name))


# The compiler of IREE 3.13 assumes that the body of a loop has the same operands as the condition. Earlier passes may
# have changed one of them, for example in an LSTM's last step. The compiler then reads past the end of a list, and
# crashes or generates a wrong program. hil unrolls such a loop if the number of steps is known, and otherwise converts
# the loop to branches. hil does not convert loops that IREE compiles correctly, because branches have a different
# error. In branches, IREE sometimes overwrites a value that passes from step to step (two variables that swap, an RNN's
# state) before the value is read. This error varies from run to run and does not occur in loops.
_BRANCHES = "builtin.module(func.func(iree-stablehlo-legalize-control-flow,iree-top-level-scf-to-cfg))"
_LOOP = re.compile(r"\bstablehlo\.while\b")
_PROBE = (
    *("--compile-to=flow", "--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu"),
    "--iree-llvmcpu-target-cpu=generic",
)
# Name of the lowered function if a wrapper calls it. TensorFlow's names never start with a dot.
_INNER = f".{ENTRY}"


def prepare(mlir: str) -> str:
    """Return a module that IREE compiles correctly, as text with locations.

    This function replaces loops that IREE would miscompile.

    Raises:
        CompileFailed: the module does not parse because it contains operations outside StableHLO.
    """
    return str(make_lowered_module(mlir).operation.get_asm(enable_debug_info=True))


# Computes a wrapper's results from the results and arguments of the lowered function.
Results = Callable[[list[Any], list[Any]], list[Any]]


def make_lowered_module(
    mlir: str, name: str = ENTRY, constants: Mapping[int, Constant] | None = None, results: Results | None = None
) -> Any:
    """Return a lowered function as a module that IREE compiles, in the current MLIR context or a new one.

    Args:
        mlir: module as text.
        name: name of the public function.
        constants: argument index -> constant value; these arguments are removed.
        results: computes the results of the public function; with None, the public function returns the results of the
            lowered function.

    Raises:
        CompileFailed: the module does not parse because of operations outside StableHLO, or a constant does not match.
    """
    from iree.compiler import ir, passmanager

    context = ir.Context.current if ir.Context.current is not None else ir.Context()
    try:
        module = ir.Module.parse(mlir, context=context)
        expand_batch_norm_grad(module)
        with context, ir.Location.unknown():
            if constants or results is not None:
                _bind_constants(module, name, constants or {}, results)
            elif name != ENTRY:
                _rename_function(module, get_function(module, ENTRY), name)
        if _LOOP.search(mlir) and _is_miscompiled(module):
            print("iree-compile crashes on these loops or miscompiles them: unrolling them", flush=True)
            with context, ir.Location.unknown():
                passmanager.PassManager.parse(INLINE).run(module.operation)
                unroll_loops(module)
                if "stablehlo.while" in str(module) and _is_miscompiled(module):
                    print(
                        "iree-compile crashes on the remaining loops or miscompiles them: converting them to branches",
                        flush=True,
                    )
                    passmanager.PassManager.parse(_BRANCHES).run(module.operation)
    except ir.MLIRError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:] if line.strip()]
        raise CompileFailed(
            f"IREE cannot parse the StableHLO from TensorFlow: {' '.join(lines[:2])[:400]}", detail=str(error)
        ) from error
    return module


def freeze(lowered: LoweredFunction, values: Sequence[Array], name: str, assigned: Sequence[str] = ()) -> bytes:
    """Return bytecode with one public function that takes only the inputs. Each call starts with the given state.

    Args:
        lowered: lowered function.
        values: values of the state.
        name: name of the public function.
        assigned: variables with new values to return after the outputs. If the lowered function does not assign such a
            variable, the initial value is returned.

    Raises:
        CompileFailed: the module does not parse, or it assigns variables that are not in ``assigned``.
    """
    from io import BytesIO

    if others := [state.spec.name for state in lowered.assigned if state.spec.name not in assigned]:
        raise CompileFailed(f"the function assigns variables that the program does not return: {', '.join(others[:4])}")
    count = len(lowered.inputs)
    states = {state.spec.name: (count + place, state.result) for place, state in enumerate(lowered.state)}
    new = [states[variable] for variable in assigned]

    def select_results(returned: list[Any], given: list[Any]) -> list[Any]:
        last = [given[place] if result is None else returned[result] for place, result in new]
        return [*returned[: len(lowered.outputs)], *last]

    constants = {
        count + place: Constant(state.spec, value)
        for place, (state, value) in enumerate(zip(lowered.state, values, strict=True))
    }
    buffer = BytesIO()
    make_lowered_module(lowered.mlir, name, constants, select_results).operation.write_bytecode(buffer)
    return buffer.getvalue()


@dataclass(frozen=True)
class Constant:
    """Constant value of a lowered function's argument."""

    spec: TensorSpec
    value: Array


def _bind_constants(module: Any, name: str, constants: Mapping[int, Constant], results: Results | None) -> None:
    """Add a public wrapper that calls the lowered function with the constants."""
    from iree.compiler import ir

    inner = get_function(module, ENTRY)
    _rename_function(module, inner, _INNER)
    inner.attributes["sym_visibility"] = ir.StringAttr.get("private")
    kind = ir.FunctionType(ir.TypeAttr(inner.attributes["function_type"]).value)
    taken = [own for place, own in enumerate(kind.inputs) if place not in constants]
    attributes = {"sym_name": ir.StringAttr.get(name), "function_type": ir.TypeAttr.get(kind)}
    function = ir.Operation.create("func.func", attributes=attributes, regions=1, ip=ir.InsertionPoint(module.body))
    block = function.regions[0].blocks.append(*taken)
    with ir.InsertionPoint(block):
        arguments = iter(block.arguments)
        given = [
            _make_constant(constants[place]) if place in constants else next(arguments)
            for place in range(len(kind.inputs))
        ]
        callee = {"callee": ir.FlatSymbolRefAttr.get(_INNER)}
        call = ir.Operation.create("func.call", results=kind.results, operands=given, attributes=callee)
        returned = list(call.results) if results is None else results(list(call.results), given)
        ir.Operation.create("func.return", operands=returned)
    outer = ir.FunctionType.get(taken, [value.type for value in returned])
    function.attributes["function_type"] = ir.TypeAttr.get(outer)
    module.operation.verify()


def _rename_function(module: Any, function: Any, name: str) -> None:
    from iree.compiler import ir

    ir.SymbolTable.replace_all_symbol_uses(ENTRY, name, module.operation)
    ir.SymbolTable.set_symbol_name(function, name)


def _is_miscompiled(module: Any) -> bool:
    """Return True if the compiler crashes on a module, or if a loop's condition and body have different operands.

    Return False if the compiler rejects the module: the actual compilation reports the error.
    """
    from iree.compiler import ir

    with make_temporary_folder("hil-loops-") as folder:
        source, found = Path(folder) / "source.mlirbc", Path(folder) / "flow.mlir"
        with source.open("wb") as file:
            module.operation.write_bytecode(file)
        command = [str(find_native_compiler()), str(source), "-o", str(found), *_PROBE]
        done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
        if done.returncode:
            return done.returncode != 1
        with ir.Context():
            compiled = ir.Module.parse(read_file(found, MAX_MODEL_BYTES))
            # The condition takes the loop's operands. The body takes values with the types of the loop's results.
            loops = find_operations(compiled.operation, "scf.while")
            return any(_list_types(loop.operands) != _list_types(loop.results) for loop in loops)


def _list_types(values: Iterable[Any]) -> list[str]:
    """Return the types of values. All tensor types become equal, because they have the same layout."""
    texts = (str(value.type) for value in values)
    return ["tensor" if text.startswith("tensor<") else text for text in texts]


def _make_constant(constant: Constant) -> Any:
    from iree.compiler import ir

    kind = ir.Type.parse(format_mlir_type(constant.spec))
    # Do not use a resource: IREE's constant folding crashes on small resources, and rejects bool or unsigned elements.
    array = np.ascontiguousarray(constant.value).reshape(constant.value.shape)
    attribute = ir.DenseElementsAttr.get(array, signless=False, type=kind)
    return ir.Operation.create("stablehlo.constant", results=[kind], attributes={"value": attribute}).result


def convert(concrete: Any, name: str) -> bytes:
    """Return a TFLite file with one signature and constant variables.

    Raises CompileFailed for unsupported operators.
    """
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    with convert_foreign_errors(CompileFailed, f"TFLite cannot convert {name}", error_text=format_converter_error):
        # The converter leaves some constant variables without a value.
        concrete = convert_variables_to_constants_v2(concrete, lower_control_flow=False)
        with make_temporary_folder("hil-tflite-") as folder:
            # Convert from a file: the converter's API without files is deprecated.
            tf.saved_model.save(tf.Module(), folder, {name: concrete})
            return bytes(tf.lite.TFLiteConverter.from_saved_model(folder, [name]).convert())
