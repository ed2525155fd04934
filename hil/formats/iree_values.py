"""Convert tensor types and signatures from and to IREE: element types, and function declarations.

A declaration reads ``sync func @main(%x: tensor<2x?xf32>, %n: i32) -> (%y: tensor<2x?xf32>)``. IREE's compiler writes
declarations for MLIR programs, but not for the torch dialect (used for ONNX and PyTorch). For this dialect, hil's
compile stage adds declarations with names and signedness. For a function without a declaration, the calling convention
specifies the number of tensors and the types of plain numbers. The tensor specs of such a function have dtype "".

4-bit elements are packed two per byte (:mod:`hil.core.tensors`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hil.core.tensors import Dim, TensorSpec
from hil.errors import LoadFailed, UsageError, format_expected

# MLIR's name -> (hil's name, IREE's element type). MLIR's f8E4M3FN is ml_dtypes' float8_e4m3fn.
_TYPES = {
    "f16": ("float16", "FLOAT_16"),
    "f32": ("float32", "FLOAT_32"),
    "f64": ("float64", "FLOAT_64"),
    "bf16": ("bfloat16", "BFLOAT_16"),
    "f8E4M3FN": ("float8_e4m3fn", "FLOAT_8_E4M3_FN"),
    "f8E4M3FNUZ": ("float8_e4m3fnuz", "FLOAT_8_E4M3_FNUZ"),
    "f8E5M2": ("float8_e5m2", "FLOAT_8_E5M2"),
    "f8E5M2FNUZ": ("float8_e5m2fnuz", "FLOAT_8_E5M2_FNUZ"),
    "f8E8M0FNU": ("float8_e8m0fnu", "FLOAT_8_E8M0_FNU"),
    "complex<f32>": ("complex64", "COMPLEX_64"),
    "complex<f64>": ("complex128", "COMPLEX_128"),
    "i1": ("bool", "BOOL_8"),
    "i4": ("int4", "INT_4"),
    "si4": ("int4", "SINT_4"),
    "ui4": ("uint4", "UINT_4"),
    "i8": ("int8", "INT_8"),
    "i16": ("int16", "INT_16"),
    "i32": ("int32", "INT_32"),
    "i64": ("int64", "INT_64"),
    "index": ("int64", "INT_64"),
    "si8": ("int8", "SINT_8"),
    "si16": ("int16", "SINT_16"),
    "si32": ("int32", "SINT_32"),
    "si64": ("int64", "SINT_64"),
    "ui8": ("uint8", "UINT_8"),
    "ui16": ("uint16", "UINT_16"),
    "ui32": ("uint32", "UINT_32"),
    "ui64": ("uint64", "UINT_64"),
}
_ELEMENT_OF = {ours: iree for ours, iree in reversed(list(_TYPES.values()))}
# Number types in calling conventions; "r" is a tensor.
_NUMBERS = {"i": "int32", "I": "int64", "f": "float32", "F": "float64"}
_FENCES = "coarse-fences"
_SIGNLESS = {"INT_8", "INT_16", "INT_32", "INT_64", "INT_4"}
SCALAR_PREFIX = "scalar:"
_TENSOR = re.compile(r"tensor<(.*)>$")
# MLIR element types that IREE cannot run. hil only translates their names.
_NAMED_ONLY = {
    "f8E4M3": "float8_e4m3",
    "f8E3M4": "float8_e3m4",
    "f4E2M1FN": "float4_e2m1fn",
    "i2": "int2",
    "ui2": "uint2",
}
_MLIR_OF = {ours: mlir for mlir, (ours, _) in reversed(list(_TYPES.items())) if mlir not in ("index", "si4")}
_MLIR_OF |= {ours: mlir for mlir, ours in _NAMED_ONLY.items()}
_FUNCTION = re.compile(r"func @(?:\"(?:[^\"\\]|\\.)*\"|[^\s(]+)\(", re.S)
_TYPE = r"tensor<[^<>]*(?:<[^<>]*>[^<>]*)?>|![A-Za-z][\w.]*(?:<[^>]*>)?|[A-Za-z]\w*(?:<[^<>]*>)?"
# Names may contain nearly any character, as in ONNX. So a value ends after a type that ", %" or the end of the text
# follows.
_VALUE = re.compile(rf"%(?P<name>.*?): (?P<type>{_TYPE})(?: \{{[^{{}}]*\}})?(?:, (?=%)|$)", re.S)


def get_element_type(dtype: str) -> Any:
    """Return IREE's element type for a dtype. Raises LoadFailed if IREE has none."""
    import iree.runtime as rt

    if dtype not in _ELEMENT_OF:
        raise LoadFailed(f"IREE does not support {dtype} tensors")
    return getattr(rt.HalElementType, _ELEMENT_OF[dtype])


def get_element_dtype(element: Any, declared: str) -> str:
    """Return the dtype of an element type. The function's declaration determines the sign of signless integers."""
    ours, signless = _map_elements().get(int(element), (declared, False))
    return declared if signless and declared.replace("uint", "int") == ours else ours


@functools.cache
def _map_elements() -> dict[int, tuple[str, bool]]:
    """Map each IREE element type to hil's dtype, and True for signless types."""
    import iree.runtime as rt

    named = reversed(list(_TYPES.values()))
    return {int(getattr(rt.HalElementType, name)): (ours, name in _SIGNLESS) for ours, name in named}


def parse_mlir_dtype(name: str) -> str | None:
    """Return the dtype of an MLIR element type (``f32``, ``si8``, ``bf16``), or None if unsupported."""
    return _TYPES[name][0] if name in _TYPES else _NAMED_ONLY.get(name)


def parse_type(name: str, text: str) -> TensorSpec:
    """Parse an MLIR value type. The spec of a bare scalar has the name prefix ``scalar:``.

    Raises:
        LoadFailed: the type is not a supported tensor or number.
    """
    text = text.strip().split(" {", 1)[0].strip()
    match = _TENSOR.match(text)
    if not match:
        dtype = parse_mlir_dtype(text)
        if dtype is None:
            raise LoadFailed(f"{name} has type {text}: hil passes only tensors and numbers")
        return TensorSpec(f"{SCALAR_PREFIX}{name}", dtype, ())
    shape: list[Dim] = []
    rest = match.group(1).split(",", 1)[0]
    # At most 18 digits: no dimension has more digits, and Python limits the number of digits in a number.
    while dim := re.match(r"(\d{1,18}|\?)x", rest):
        shape.append(None if dim.group(1) == "?" else int(dim.group(1)))
        rest = rest[dim.end() :]
    dtype = parse_mlir_dtype(rest)
    if dtype is None:
        raise LoadFailed(f"{name} has unsupported element type {rest}")
    return TensorSpec(name, dtype, tuple(shape))


def parse_declaration(text: str) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Parse the inputs and outputs in an ``iree.abi.declaration``.

    Example: ``sync func @main(%input0: tensor<4x?xf32>, ...) -> (%output0: tensor<4xi32>)``.

    Raises:
        LoadFailed: the declaration is missing, or a type in it is unsupported.
    """
    body = text.rstrip()
    # Names may contain the arrow, so split at the last arrow.
    head, arrow, outputs = body.removesuffix(")").rpartition(") -> (")
    match = _FUNCTION.search(head)
    if not (match and arrow and body.endswith(")")):
        raise LoadFailed(
            f"invalid IREE function declaration: {text[:200]!r}",
            hint="select an exported function, and compile the program with hil or from MLIR",
        )
    return _parse_values(head[match.end() :]), _parse_values(outputs)


@dataclass(frozen=True)
class Function:
    """Exported function, as described by its module."""

    name: str
    declaration: str  # ``iree.abi.declaration``; "" if missing
    convention: str  # calling convention: ``0rI_r`` has a tensor and an int64 number as inputs and a tensor as output
    fences: bool = False  # True if the inputs are followed by a wait fence and a signal fence

    def make_signature(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Return the inputs and outputs; a tensor of unknown type has dtype "".

        Raises:
            LoadFailed: a type is unsupported.
        """
        if not self.declaration:
            return parse_convention(self.convention)
        # The compiler writes the function's name unescaped, including spaces and brackets.
        return parse_declaration(self.declaration.replace(f"func @{self.name}(", "func @f(", 1))


def list_module_functions(module: Any) -> dict[str, Function]:
    """Return the callable functions of an ``iree.runtime.VmModule`` by name."""
    found = {}
    for name in module.function_names:
        if name.startswith("__"):
            continue
        function = module.lookup_function(name)
        reflection = function.reflection
        found[name] = Function(
            name,
            reflection.get("iree.abi.declaration", ""),
            # the Python bindings expose the calling convention only in this text
            repr(function).removeprefix(f"<VmFunction {name}(").partition(")")[0],
            reflection.get("iree.abi.model") == _FENCES,
        )
    return found


def list_entry_points(functions: Mapping[str, Function]) -> list[str]:
    """Return the names of the functions that a user can choose: functions without fences, or all if each has fences.

    ``f$async``, the asynchronous variant of ``f``, is left out.
    """
    names = [name for name in functions if not name.endswith("$async")]
    return [name for name in names if not functions[name].fences] or names


def choose_function(functions: Mapping[str, Function], name: str) -> Function:
    """Return the named function; for "", the only entry point or ``main``.

    Raises:
        LoadFailed: the function does not exist, or the choice is ambiguous.
    """
    offered = list_entry_points(functions)
    chosen = name or (offered[0] if len(offered) == 1 else "main" if "main" in offered else "")
    if chosen not in functions:
        wanted = (
            f"no function {name!r}"
            if name
            else "multiple functions, and no function was selected"
            if offered
            else "no functions"
        )
        hint = format_expected(offered, "use --function with one of: ")
        raise LoadFailed(f"the module has {wanted}", hint=hint, option="--function" if offered else "")
    return functions[chosen]


def parse_convention(text: str) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Parse the inputs and outputs in a calling convention such as ``0rI_r``.

    Raises:
        LoadFailed: the convention is from another IREE version, or has values besides tensors and numbers.
    """
    version, inputs, given, outputs = text[:1], *text[1:].partition("_")
    if version != "0" or not given or set(inputs + outputs) - {"r", "v", *_NUMBERS}:
        raise LoadFailed(
            f"the function has the unknown calling convention {text!r}",
            hint="add an attribute iree.abi.declaration with the inputs and outputs to the function",
        )
    return _parse_convention("input", inputs), _parse_convention("output", outputs)


def _parse_convention(kind: str, letters: str) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(f"{SCALAR_PREFIX if letter in _NUMBERS else ''}{kind}{number}", _NUMBERS.get(letter, ""), ())
        for number, letter in enumerate(letters.replace("v", ""))
    )


def format_reflection(function: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    """Format a declaration for a function's ``iree.reflection``, the inverse of :func:`parse_declaration`.

    Raises:
        UsageError: MLIR has no type for a dtype.
    """
    args, results = (
        ", ".join(f"%{spec.name}: {format_mlir_type(spec)}" for spec in specs) for specs in (inputs, outputs)
    )
    return f'sync func @"{function}"({args}) -> ({results})'


def format_mlir_type(spec: TensorSpec) -> str:
    """Return a tensor's MLIR type, such as ``tensor<2x?xf32>``; unsigned integers keep their sign (``ui8``).

    Raises:
        UsageError: MLIR has no type for the dtype.
    """
    if spec.dtype not in _MLIR_OF:
        raise UsageError(f"{spec}: MLIR does not support {spec.dtype}")
    dims = "".join(f"{dim if isinstance(dim, int) else '?'}x" for dim in spec.shape)
    return f"tensor<{dims}{_MLIR_OF[spec.dtype]}>"


def _parse_values(text: str) -> tuple[TensorSpec, ...]:
    specs: list[TensorSpec] = []
    position = 0
    while position < len(text):
        match = _VALUE.match(text, position)
        if not match:
            raise LoadFailed(f"truncated IREE declaration: {text[position : position + 200]!r}")
        specs.append(parse_type(match["name"], match["type"]))
        position = match.end()
    return tuple(specs)


def read_functions(path: str) -> dict[str, Any]:
    """Read an IREE module's functions from its file, for :func:`decode_functions`. Runs in a separate process.

    Raises:
        LoadFailed: the file is not a module.
    """
    import iree.runtime as rt

    try:
        functions = list_module_functions(rt.VmModule.mmap(rt.VmInstance(), path))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = lines[0][:400] if lines else type(error).__name__
        raise LoadFailed(f"IREE cannot load {Path(path).name}: {text}", detail=str(error)) from error
    return {"functions": [asdict(one) for one in functions.values()]}


def decode_functions(document: Mapping[str, Any]) -> dict[str, Function]:
    """Return the functions from a :func:`read_functions` result, by name."""
    return {one["name"]: Function(**one) for one in document["functions"]}
