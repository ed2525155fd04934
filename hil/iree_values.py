"""How tensors and signatures look to IREE: element types, and what a function's reflection says of it."""

from __future__ import annotations

import re
from typing import Any

from hil.errors import LoadFailed
from hil.tensors import Dim, TensorSpec

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
    "i8": ("int8", "INT_8"),
    "i16": ("int16", "INT_16"),
    "i32": ("int32", "INT_32"),
    "i64": ("int64", "INT_64"),
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
_SIGNLESS = {"INT_8", "INT_16", "INT_32", "INT_64", "INT_4"}
SCALAR_PREFIX = "scalar:"
_TENSOR = re.compile(r"tensor<(.*)>$")


def element_of(dtype: str) -> Any:
    """IREE's element type for a dtype.

    Raises:
        LoadFailed: IREE has none.
    """
    import iree.runtime as rt

    if dtype not in _ELEMENT_OF:
        raise LoadFailed(f"IREE takes no {dtype} tensors")
    return getattr(rt.HalElementType, _ELEMENT_OF[dtype])


def dtype_of_element(element: Any, declared: str) -> str:
    """The dtype of an element type; a signless integer's sign is as the function declares it."""
    import iree.runtime as rt

    for ours, name in _TYPES.values():
        if element == getattr(rt.HalElementType, name):
            return declared if name in _SIGNLESS and declared.replace("uint", "int") == ours else ours
    return declared


def mlir_dtype(name: str) -> str | None:
    """The dtype of an MLIR element type (``f32``, ``si8``, ``bf16``), or None where hil has none for it."""
    return _TYPES[name][0] if name in _TYPES else None


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
    while dim := re.match(r"(\d+|\?)x", rest):
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
    start = text.find("(")
    if start < 0:
        raise LoadFailed("the function carries no IREE ABI declaration", hint="call one that the compiler exports")
    end = _closing(text, start)
    inputs = _values(text[start + 1 : end])
    arrow = text.find("->", end)
    if arrow < 0:
        return inputs, ()
    first = text.find("(", arrow)
    if first < 0:
        return inputs, (parse_type("output0", text[arrow + 2 :]),)
    return inputs, _values(text[first + 1 : _closing(text, first)])


def _values(text: str) -> tuple[TensorSpec, ...]:
    specs = []
    for part in _split(text):
        name, _, kind = part.partition(":")
        specs.append(parse_type(name.strip().lstrip("%"), kind))
    return tuple(specs)


def _split(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        depth += (char in "(<{[") - (char in ")}]" or (char == ">" and text[position - 1] != "-"))
        if char == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _closing(text: str, opening: int) -> int:
    depth = 0
    for position in range(opening, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position
    raise LoadFailed(f"an IREE ABI declaration is cut off: {text[:100]}")
