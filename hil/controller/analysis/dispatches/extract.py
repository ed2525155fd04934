"""Extract the dispatches of an IREE program as standalone MLIR modules, with inputs and expected outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hil.controller.analysis.dispatches.linalg import evaluate_dispatch
from hil.controller.analysis.dispatches.scalars import CannotEvaluate, evaluate_scalar, read_elements
from hil.controller.analysis.profile.sites import find_sites, read_dispatch_name
from hil.controller.backends.compilers.arithmetic import convert_arithmetic, split_flags
from hil.controller.backends.compilers.iree import convert_for_iree
from hil.controller.backends.compilers.iree_program import (
    Source,
    choose_settings,
    describe_source,
    fail,
    prepare,
    run_compiler,
)
from hil.controller.models.compiling import Work, call_isolated, convert_compiler_errors
from hil.controller.models.inputs import make_random_tensor
from hil.controller.storage.cache import Cache
from hil.controller.storage.sources.own_code import digest_code
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.core.files import MAX_MODEL_BYTES, read_file
from hil.core.results import Model
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import Array, TensorSpec
from hil.errors import LoadFailed, UsageError
from hil.formats.iree_values import SCALAR_PREFIX, parse_type

if TYPE_CHECKING:
    from typing_extensions import Unpack

FUNCTION = "dispatch"
_FILE, _INPUTS, _EXPECTED = "dispatches.json", "inputs", "expected"
_CODE = "controller/analysis/dispatches/*.py"
_UNSAFE = re.compile(r"[^\w.+-]")
# Operations whose operands have a limited range: indices into a tensor, and divisors.
_INDEXING = re.compile(r"tensor\.extract %\S+\[.*\] : tensor<(?P<shape>[\dx]+)x")
_DIVIDING = ("arith.divsi", "arith.divui", "arith.remsi", "arith.remui", "arith.floordivsi", "arith.ceildivsi")


@dataclass(frozen=True)
class Dispatch:
    """Dispatch of a program: a kernel and the calls."""

    key: str  # the name in profiles and compile-time profiles
    nodes: tuple[str, ...]  # model nodes that the calls compute, in model order
    op_types: tuple[str, ...]
    calls: int  # number of call sites
    # inputs, outputs: specs of the standalone module; empty if unsupported.
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    path: Path | None = None  # standalone MLIR module; None if unsupported
    reason: str = ""  # why the dispatch is unsupported; "" if it can run separately
    not_evaluated: str = ""  # why numpy cannot compute the outputs; "" if the outputs are stored

    @property
    def name(self) -> str:
        """The key as a file name."""
        return _UNSAFE.sub("_", self.key)

    def load_inputs(self) -> dict[str, Array]:
        """Return the inputs: constants of the program, otherwise seeded random values."""
        assert self.path is not None
        return load_tensors(self.path.parent / _INPUTS)

    def load_expected(self) -> dict[str, Array]:
        """Return the outputs that numpy computed, or an empty dict if numpy could not compute them."""
        assert self.path is not None
        return {} if self.not_evaluated else load_tensors(self.path.parent / _EXPECTED)


def extract_dispatches(
    model: Model, flags: Sequence[str], *, seed: int = 0, **work: Unpack[Work]
) -> tuple[Dispatch, ...]:
    """Return the dispatches of a model's program, in the program's order.

    Equal dispatches count as one dispatch, because the compiler merges them. hil compiles the model up to the phase
    *flow*, which forms the dispatches. The code of a dispatch is generated later, from its standalone module.

    Args:
        flags: the flags of the program.
        seed: seed of the random inputs.

    Raises:
        UsageError: the model is a compiled program.
        CompileFailed, CompileCrashed, StageTimeout: the model cannot be compiled.
        StorageError: the dispatches cannot be stored.
    """
    if model.format == "vmfb":
        raise UsageError(
            f"{model.path.name} is a compiled program: its dispatches cannot be extracted", hint="pass the model"
        )
    arithmetic, flags = split_flags(flags)
    taken = convert_for_iree(model, flags, {**work, "recompute": False})
    model = taken.model
    if arithmetic and model.format == "onnx":
        model = convert_arithmetic(model, arithmetic, {**work, "recompute": False})
    recipe = choose_settings(model, taken.flags)

    def make(folder: Path) -> None:
        what = "the dispatches"
        arguments = {
            "source": vars(describe_source(model, recipe.flags)),
            "seed": seed,
            "folder": str(folder.absolute()),
            "log": str(work["log"].absolute()),
        }
        with convert_compiler_errors(f"extracting {what}", died=what, failed=what):
            found = call_isolated(build, arguments, work)
        (folder / _FILE).write_text(json.dumps(found))

    key = Cache.key("dispatches", program=recipe.key, seed=seed, code=digest_code(_CODE))
    entry, _ = work["cache"].get_or_make(key, {**recipe.meta, "what": "dispatches"}, make, work["recompute"])
    how: Any = {name: work[name] for name in ("cache", "isolated", "timeout", "log")}
    sites = find_sites(model, taken.flags, **how)
    nodes: dict[str, dict[str, None]] = {}
    for region in sites.regions:
        for site in region.sites:
            nodes.setdefault(site.key, {}).update(dict.fromkeys(site.nodes))
    order = {name: number for number, name in enumerate(sites.op_types)}
    dispatches = []
    for item in json.loads(read_file(entry / _FILE)):
        own = tuple(sorted(nodes.get(item["key"], ()), key=lambda name: order.get(name, 0)))
        types = tuple(dict.fromkeys(sites.op_types[name] for name in own if name in sites.op_types))
        dispatch = Dispatch(item["key"], own, types, item["calls"], reason=item["reason"])
        if not dispatch.reason:
            inputs, outputs = (
                tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in item[side])
                for side in ("inputs", "outputs")
            )
            path = entry / item["file"]
            dispatch = replace(dispatch, inputs=inputs, outputs=outputs, path=path, not_evaluated=item["not_evaluated"])
        dispatches.append(dispatch)
    return tuple(dispatches)


def build(source: Mapping[str, Any], seed: int, folder: str, log: str) -> list[dict[str, Any]]:
    """Write each dispatch of a program to a directory. Runs in an isolated process.

    Args:
        source: the fields of a :class:`Source`.

    Returns:
        For each dispatch: ``key``, ``calls`` and ``reason``. If ``reason`` is empty, also ``file``, ``inputs`` and
        ``outputs`` ([name, dtype, shape]), and ``not_evaluated``.
    """
    from iree.compiler import ir

    own = Source(**source)
    with make_temporary_folder("hil-dispatches-") as scratch:
        place = Path(scratch)
        module_file = prepare(own, place, place, None)
        out = place / "flow.mlirbc"
        flags = [*own.flags, "--compile-to=flow", "--emit-mlir-bytecode"]
        code, printed = run_compiler(module_file, out, flags, place, Path(log))
        if code:
            fail(code, printed)
        module = ir.Module.parse(read_file(out, MAX_MODEL_BYTES), context=ir.Context())
    executables = {
        ir.StringAttr(op.operation.attributes["sym_name"]).value: op.operation
        for op in module.body.operations
        if op.operation.name == "flow.executable"
    }
    weights = {
        ir.StringAttr(op.operation.attributes["sym_name"]).value: op.operation.attributes["initial_value"]
        for op in module.body.operations
        if op.operation.name == "util.global" and "initial_value" in op.operation.attributes
    }
    calls: dict[str, list[Any]] = {}
    for call in _find_calls(module.operation):
        calls.setdefault(read_dispatch_name(call.attributes), []).append(call)
    found = []
    for number, (key, several) in enumerate(calls.items()):
        item: dict[str, Any] = {"key": key, "calls": len(several), "reason": ""}
        try:
            target = Path(folder) / f"{number}"
            item |= _write_dispatch(several[0], executables, weights, key, target, seed)
        except _Unsupported as why:
            item["reason"] = str(why)
        found.append(item)
    return found


class _Unsupported(Exception):
    """A dispatch that cannot run separately."""


def _find_calls(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for op in block.operations:
                if op.operation.name == "flow.dispatch":
                    yield op.operation
                else:
                    yield from _find_calls(op.operation)


def _write_dispatch(
    call: Any, executables: Mapping[str, Any], weights: Mapping[str, Any], key: str, folder: Path, seed: int
) -> dict[str, Any]:
    from iree.compiler import ir

    entry = str(call.attributes["entry_points"])
    executable = executables.get(entry.removeprefix("[@").partition("::@")[0].strip('"'))
    if executable is None:
        raise _Unsupported("its executable was not compiled from MLIR")
    inputs = [_read_spec(f"arg{number}", value.type) for number, value in enumerate(call.operands)]
    outputs = [_read_spec(f"output{number}", value.type) for number, value in enumerate(call.results)]
    text = _write_standalone(call, executable, key)
    try:
        ir.Module.parse(text, context=ir.Context())
    except ir.MLIRError as error:
        raise _Unsupported(f"its MLIR is invalid outside of the program: {str(error).splitlines()[-1][:120]}") from None
    inside = (op.operation for op in executable.regions[0].blocks[0].operations)
    code = next(op for op in inside if op.name == "builtin.module").get_asm(use_local_scope=True)
    folder.mkdir()
    name = _UNSAFE.sub("_", key)
    (folder / f"{name}.mlir").write_text(text)
    given = {}
    for spec, value in zip(inputs, call.operands, strict=True):
        constant = _read_constant(value, weights)
        given[spec.name] = _draw_input(spec, code, seed) if constant is None else constant
    save_tensors(folder / _INPUTS, given)
    item: dict[str, Any] = {"file": f"{folder.name}/{name}.mlir", "not_evaluated": ""}
    item["inputs"], item["outputs"] = (
        [[spec.name, spec.dtype, list(spec.shape)] for spec in side] for side in (inputs, outputs)
    )
    try:
        copy = ir.Module.parse(code, context=ir.Context())
        results = evaluate_dispatch(copy, list(given.values()), _read_tied(call))
        save_tensors(folder / _EXPECTED, dict(zip((spec.name for spec in outputs), results, strict=True)))
    except CannotEvaluate as why:
        item["not_evaluated"] = str(why)
    return item


def _read_spec(name: str, kind: Any) -> TensorSpec:
    """Return the spec of a dispatch's operand or result. Raises _Unsupported if a caller cannot pass it."""
    text = str(kind)
    if not text.startswith("tensor<"):
        raise _Unsupported(f"{name} is a dynamic size or a loop index, which the program computes ({text})")
    if "?" in text:
        raise _Unsupported(f"{name} has a dynamic shape ({text})")
    if "#" in text:
        raise _Unsupported(f"{name} has a compiler-internal layout ({text[:80]})")
    try:
        spec = parse_type(name, text)
    except LoadFailed as error:
        raise _Unsupported(error.message) from None
    return replace(spec, name=spec.name.removeprefix(SCALAR_PREFIX))


def _write_standalone(call: Any, executable: Any, key: str) -> str:
    """Return a module with the executable, and a function that calls it with tensors.

    The entry point gets the executable's name. The compiler appends a summary to this name, and the result is the key
    again.
    """
    from iree.compiler import ir

    name = ir.StringAttr(executable.attributes["sym_name"]).value
    with call.context:
        symbol, entry = (str(ir.FlatSymbolRefAttr.get(text)) for text in (name, key))
    own = executable.get_asm(use_local_scope=True, enable_debug_info=True)
    own = re.sub(re.escape(entry) + r"(?![\w$.-])", lambda _: symbol, own)
    operands = [str(value.type) for value in call.operands]
    results = [str(value.type) for value in call.results]
    tied = _read_tied(call)
    returned = []
    for position, kind in enumerate(results):
        operand = tied[position]
        if operand >= 0 and operands[operand] != kind:
            raise _Unsupported(f"its result has a different type than the buffer that it overwrites ({kind})")
        returned.append(f"%arg{operand}" if operand >= 0 else kind)
    values = [f"%0#{number}" for number in range(len(results))] if len(results) > 1 else ["%0"]
    parameters = ", ".join(f"%arg{number}: {kind}" for number, kind in enumerate(operands))
    arguments = ", ".join(f"%arg{number}" for number in range(len(operands)))
    head = f"%0:{len(results)}" if len(results) > 1 else "%0"
    return (
        f"{own}\n"
        f"util.func public @{FUNCTION}({parameters}) -> ({', '.join(results)}) {{\n"
        f"  {head} = flow.dispatch {symbol}::{symbol}({arguments}) : ({', '.join(operands)}) -> "
        f"({', '.join(returned)})\n"
        f"  util.return {', '.join(values)} : {', '.join(results)}\n"
        "}\n"
    )


def _read_tied(call: Any) -> list[int]:
    """Return, for every result, the position of the operand that it overwrites, or -1."""
    from iree.compiler import ir

    if "tied_operands" not in call.attributes:
        return [-1] * len(call.results)
    return [ir.IntegerAttr(item).value for item in call.attributes["tied_operands"]]


def _read_constant(value: Any, weights: Mapping[str, Any]) -> Array | None:
    """Return an operand's value if it is a constant of the program, otherwise None."""
    from iree.compiler import ir

    kind, operation = value.type, _find_producer(value)
    if operation is not None and operation.name == "flow.tensor.reshape":
        operation = _find_producer(operation.operands[0])
    try:
        if operation is None or not operation.results:
            return None
        if operation.name == "flow.tensor.splat":
            scalar = _find_producer(operation.operands[0])
            if scalar is None or scalar.name != "arith.constant":
                return None
            return np.full(kind.shape, evaluate_scalar(scalar, [], wide=False))
        if operation.name in ("flow.tensor.constant", "arith.constant"):
            attribute = operation.attributes["value"]
        elif operation.name == "util.global.load":
            attribute = weights[ir.FlatSymbolRefAttr(operation.attributes["global"]).value]
        else:
            return None
        return read_elements(attribute, operation.results[0].type).reshape(kind.shape)
    except (KeyError, CannotEvaluate):
        return None


def _find_producer(value: Any) -> Any:
    """Return the operation that computes a value; None for a function's argument."""
    return getattr(value.owner, "operation", None)


def _draw_input(spec: TensorSpec, code: str, seed: int) -> Array:
    """Return random values. If the code uses integers as indices or divisors, they are in the valid range."""
    bounds = None
    if "int" in spec.dtype:
        sizes = [int(size) for match in _INDEXING.finditer(code) for size in match["shape"].split("x")]
        if sizes:
            bounds = (0.0, float(min(sizes) - 1))
        elif any(name in code for name in _DIVIDING):
            bounds = (1.0, 100.0)
    shape = [size for size in spec.shape if isinstance(size, int)]
    return np.asarray(make_random_tensor(spec, shape, seed=seed, bounds=bounds))
