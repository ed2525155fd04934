"""How tensors and signatures look to IREE: element types, and what a module says of its functions.

A declaration reads ``sync func @main(%x: tensor<2x?xf32>, %n: i32) -> (%y: tensor<2x?xf32>)``. IREE's compiler writes
one for MLIR programs and none for those in the torch dialect (which ONNX and PyTorch become); hil's own compile stage
adds it there, with names and signedness. Of a function without one the calling convention tells how many tensors and
numbers it takes and gives, and the types of the numbers: its tensors' specs have the dtype "".
Elements of 4 bits are packed two a byte (:mod:`hil.core.tensors`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hil.core.tensors import Dim, TensorSpec
from hil.errors import LoadFailed, UsageError, one_of

# MLIR's name -> ours -> IREE's element type. MLIR's f8E4M3FN is ml_dtypes' float8_e4m3fn.
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
# What a calling convention says of numbers; "r" is a tensor.
_NUMBERS = {"i": "int32", "I": "int64", "f": "float32", "F": "float64"}
_FENCES = "coarse-fences"
_SIGNLESS = {"INT_8", "INT_16", "INT_32", "INT_64", "INT_4"}
SCALAR_PREFIX = "scalar:"
_TENSOR = re.compile(r"tensor<(.*)>$")
# Element types with a name of their own in MLIR and nothing behind them at run time; hil can still name them.
_NAMED_ONLY = {
    "f8E4M3": "float8_e4m3",
    "f8E3M4": "float8_e3m4",
    "f4E2M1FN": "float4_e2m1fn",
    "i2": "int2",
    "ui2": "uint2",
}
_MLIR_OF = {ours: mlir for mlir, (ours, _) in reversed(list(_TYPES.items())) if mlir not in ("index", "si4")}
_MLIR_OF |= {ours: mlir for mlir, ours in _NAMED_ONLY.items()}
_SIGNATURE = re.compile(r"func @(?:\"(?:[^\"\\]|\\.)*\"|[^\s(]+)\((?P<inputs>.*)\) -> \((?P<outputs>.*)\)\s*$", re.S)
_TYPE = r"tensor<[^<>]*(?:<[^<>]*>[^<>]*)?>|![A-Za-z][\w.]*(?:<[^>]*>)?|[A-Za-z]\w*(?:<[^<>]*>)?"
# A name may hold nearly anything (ONNX's do), so a value ends where a type, and then ", %" or the end, follow.
_VALUE = re.compile(rf"%(?P<name>.*?): (?P<type>{_TYPE})(?: \{{[^}}]*\}})?(?:, (?=%)|$)", re.S)


def element_of(dtype: str) -> Any:
    """IREE's element type for a dtype. Raises LoadFailed: IREE has none."""
    import iree.runtime as rt

    if dtype not in _ELEMENT_OF:
        raise LoadFailed(f"IREE takes no {dtype} tensors")
    return getattr(rt.HalElementType, _ELEMENT_OF[dtype])


def dtype_of_element(element: Any, declared: str) -> str:
    """The dtype of an element type; a signless integer's sign is as the function declares it."""
    ours, signless = _named_elements().get(int(element), (declared, False))
    return declared if signless and declared.replace("uint", "int") == ours else ours


@functools.cache
def _named_elements() -> dict[int, tuple[str, bool]]:
    """Of each IREE element type: our dtype, and whether it has no sign of its own."""
    import iree.runtime as rt

    named = reversed(list(_TYPES.values()))
    return {int(getattr(rt.HalElementType, name)): (ours, name in _SIGNLESS) for ours, name in named}


def mlir_dtype(name: str) -> str | None:
    """The dtype of an MLIR element type (``f32``, ``si8``, ``bf16``), or None where hil has none for it."""
    return _TYPES[name][0] if name in _TYPES else _NAMED_ONLY.get(name)


def parse_type(name: str, text: str) -> TensorSpec:
    """The spec of a value of an MLIR type; a bare scalar's name begins with ``scalar:``.

    Raises:
        LoadFailed: the type is no tensor or number that hil can pass.
    """
    text = text.strip().split(" {", 1)[0].strip()
    match = _TENSOR.match(text)
    if not match:
        dtype = mlir_dtype(text)
        if dtype is None:
            raise LoadFailed(f"{name} is of type {text}: hil passes tensors and numbers only")
        return TensorSpec(f"{SCALAR_PREFIX}{name}", dtype, ())
    shape: list[Dim] = []
    rest = match.group(1).split(",", 1)[0]
    # 18 digits: nobody has a longer dimension, and Python reads no numbers of any length.
    while dim := re.match(r"(\d{1,18}|\?)x", rest):
        shape.append(None if dim.group(1) == "?" else int(dim.group(1)))
        rest = rest[dim.end() :]
    dtype = mlir_dtype(rest)
    if dtype is None:
        raise LoadFailed(f"{name} has elements of type {rest}: hil has no such dtype")
    return TensorSpec(name, dtype, tuple(shape))


def parse_declaration(text: str) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs from an ``iree.abi.declaration``.

    It reads ``sync func @main(%input0: tensor<4x?xf32>, ...) -> (%output0: tensor<4xi32>)``.

    Raises:
        LoadFailed: there is no declaration, or a type in it is none that hil can pass.
    """
    match = _SIGNATURE.search(text)
    if not match:
        raise LoadFailed(
            f"no declaration of an IREE function: {text[:200]!r}",
            hint="call one that the compiler exports, of a program compiled by hil or from MLIR",
        )
    return _values(match["inputs"]), _values(match["outputs"])


@dataclass(frozen=True)
class Function:
    """An exported function, as its module tells of it."""

    name: str
    declaration: str  # its ``iree.abi.declaration``; "" where it has none
    convention: str  # its calling convention: ``0rI_r`` takes a tensor and an int64 number and gives a tensor
    fences: bool = False  # the call takes two fences after its inputs, one to wait for and one to signal

    def signature(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Inputs and outputs; of a tensor of which nothing is known the dtype is "".

        Raises:
            LoadFailed: a type is none that hil can pass.
        """
        if not self.declaration:
            return parse_convention(self.convention)
        # The compiler writes the function's name as it is, spaces and brackets and all.
        return parse_declaration(self.declaration.replace(f"func @{self.name}(", "func @f(", 1))


def functions_of(module: Any) -> dict[str, Function]:
    """The functions of an ``iree.runtime.VmModule`` that can be called, by name."""
    found = {}
    for name in module.function_names:
        if name.startswith("__"):
            continue
        function = module.lookup_function(name)
        reflection = function.reflection
        found[name] = Function(
            name,
            reflection.get("iree.abi.declaration", ""),
            # The bindings tell the convention in this text alone.
            repr(function).removeprefix(f"<VmFunction {name}(").partition(")")[0],
            reflection.get("iree.abi.model") == _FENCES,
        )
    return found


def entry_points(functions: Mapping[str, Function]) -> list[str]:
    """The functions to offer: those that take no fences, and only where there are none of these the others.

    ``f$async`` is the second face of ``f``.
    """
    names = [name for name in functions if not name.endswith("$async")]
    return [name for name in names if not functions[name].fences] or names


def choose_function(functions: Mapping[str, Function], name: str) -> Function:
    """The function of that name; of "" the only entry point, or ``main``.

    Raises:
        LoadFailed: there is no such function, or there are several and none is chosen.
    """
    offered = entry_points(functions)
    chosen = name or (offered[0] if len(offered) == 1 else "main" if "main" in offered else "")
    if chosen not in functions:
        wanted = f"no function {name!r}" if name else "several functions and none chosen" if offered else "no functions"
        raise LoadFailed(f"the module has {wanted}", hint=one_of(offered, "--function with one of: "))
    return functions[chosen]


def parse_convention(text: str) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs from a calling convention such as ``0rI_r``.

    Raises:
        LoadFailed: it is of another version of IREE, or has what is neither tensor nor number.
    """
    version, inputs, given, outputs = text[:1], *text[1:].partition("_")
    if version != "0" or not given or set(inputs + outputs) - {"r", "v", *_NUMBERS}:
        raise LoadFailed(
            f"the function has the calling convention {text!r}, which hil does not know",
            hint="a declaration (iree.abi.declaration) would tell what it takes and gives",
        )
    return _of_convention("input", inputs), _of_convention("output", outputs)


def _of_convention(kind: str, letters: str) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(f"{SCALAR_PREFIX if letter in _NUMBERS else ''}{kind}{number}", _NUMBERS.get(letter, ""), ())
        for number, letter in enumerate(letters.replace("v", ""))
    )


def declaration(function: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    """The reverse of :func:`parse_declaration`, for a function's ``iree.reflection``.

    Raises:
        UsageError: MLIR has no type for a dtype.
    """
    args, results = (", ".join(f"%{spec.name}: {mlir_type(spec)}" for spec in specs) for specs in (inputs, outputs))
    return f'sync func @"{function}"({args}) -> ({results})'


def mlir_type(spec: TensorSpec) -> str:
    """The MLIR type of a tensor, ``tensor<2x?xf32>``; unsigned integers keep their sign (``ui8``).

    Raises:
        UsageError: MLIR has no type for the dtype.
    """
    if spec.dtype not in _MLIR_OF:
        raise UsageError(f"{spec}: MLIR has no type for {spec.dtype}")
    dims = "".join(f"{dim if isinstance(dim, int) else '?'}x" for dim in spec.shape)
    return f"tensor<{dims}{_MLIR_OF[spec.dtype]}>"


def _values(text: str) -> tuple[TensorSpec, ...]:
    specs: list[TensorSpec] = []
    position = 0
    while position < len(text):
        match = _VALUE.match(text, position)
        if not match:
            raise LoadFailed(f"an IREE declaration is cut off: {text[position : position + 200]!r}")
        specs.append(parse_type(match["name"], match["type"]))
        position = match.end()
    return tuple(specs)


def read_functions(path: str) -> dict[str, Any]:
    """Read the functions of an IREE module from its file, for :func:`functions_in`; runs in a process of its own.

    Raises:
        LoadFailed: it is no module.
    """
    import iree.runtime as rt

    try:
        functions = functions_of(rt.VmModule.mmap(rt.VmInstance(), path))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = lines[0][:400] if lines else type(error).__name__
        raise LoadFailed(f"IREE refused {Path(path).name}: {text}", detail=str(error)) from error
    return {"functions": [asdict(one) for one in functions.values()]}


def functions_in(document: Mapping[str, Any]) -> dict[str, Function]:
    """The functions that :func:`read_functions` found, by name."""
    return {one["name"]: Function(**one) for one in document["functions"]}
