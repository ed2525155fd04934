"""Parse ExecuTorch files: methods in a ``.pte``, and test cases bundled in a ``.bpte``.

The parser does not need ExecuTorch. So a host without PyTorch can send programs, and a board can check for missing
parts before loading. ExecuTorch ships the schemas (``program.fbs``, ``bundled_program_schema.fbs``). Field numbers
follow the order of the fields in the schema.

The flatbuffers are untrusted: damaged or hostile data raises an error, never a crash or endless loop.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hil.core.files import FileReader, load_file, map_file
from hil.core.tensors import Array, Dim, TensorSpec, count_bytes, from_bytes

# Minimum table size: the layout's offset.
_TABLE_BYTES = 4
# Limit on the bytes read, as a multiple of the file's size. Writers store equal data once, so some bytes are read
# repeatedly. Without a limit, a small hostile file could describe huge data.
_MAX_EXPANSION = 16
PROGRAM = b"ET12"
BUNDLE = b"BP08"
TENSORS = b"FT01"
# ExecuTorch's suffix for external tensor files.
TENSORS_SUFFIX = ".ptd"
# Limit for the part of an external tensor file that describes the tensors.
_MAX_TENSOR_NAMES_BYTES = 64 << 20
_DEFAULT_METHOD = "forward"
# ExecuTorch's ScalarType, same as PyTorch's.
DTYPES = {
    **dict(enumerate("uint8 int8 int16 int32 int64 float16 float32 float64".split())),
    11: "bool",
    15: "bfloat16",
    **dict(
        enumerate("float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz uint16 uint32 uint64".split(), start=23)
    ),
}
# Kinds in the unions KernelTypes (program; further kinds are lists) and ValueUnion (bundle).
_KINDS = ("", "none", "int", "bool", "double", "tensor", "string")
_BUNDLED_KINDS = ("", "tensor", "int", "bool", "double")
_SCALARS = {"int": "int64", "bool": "bool", "double": "float64"}
# KernelCall and DelegateCall store value indices in field 1. MoveCall has two fields with an index each.
_KERNEL_CALL, _DELEGATE_CALL, _MOVE_CALL = 1, 2, 3
_EXTERNAL = 1  # TensorDataLocation
_MAX_DIMS = 32


class Damaged(ValueError):
    """The buffer is truncated, altered, or has an unknown version; the message specifies the cause."""


@contextlib.contextmanager
def convert_parse_errors() -> Iterator[None]:
    """Convert Python errors from parsing an invalid flatbuffer to :class:`Damaged`."""
    try:
        yield
    # flatbuffers raises TypeError for an offset out of range.
    except (struct.error, IndexError, UnicodeDecodeError, TypeError, OverflowError) as error:
        raise Damaged("truncated or corrupt file") from error


class Table:
    """Flatbuffer table with numbered fields. Missing fields have their default.

    Args:
        left: list with one number: the bytes that may still be read. All tables of a root share the list.
    """

    def __init__(self, data: memoryview, at: int, left: list[int]) -> None:
        from flatbuffers import number_types, table

        self._table = table.Table(data, at)
        self._types = number_types
        self._left = left
        self._spend(_TABLE_BYTES)

    def _find_offset(self, field: int) -> int:
        return int(self._table.Offset(4 + 2 * field))

    def number(self, field: int, kind: str, default: int = 0) -> Any:
        """Return a number; ``kind`` is ``Int8``, ``Uint64``, ``Float64``, ``Bool`` ..., ``default`` is the schema's."""
        offset, flags = self._find_offset(field), getattr(self._types, f"{kind}Flags")
        return self._table.Get(flags, self._table.Pos + offset) if offset else flags.py_type(default)

    def text(self, field: int) -> str:
        """Return a string; "" by default."""
        offset = self._find_offset(field)
        return self._table.String(self._table.Pos + offset).decode() if offset else ""

    def read_table(self, field: int) -> Table | None:
        """Return a table or a union's table."""
        offset = self._find_offset(field)
        return self._follow(self._table.Pos + offset) if offset else None

    def iter_tables(self, field: int) -> Iterator[Table]:
        """Yield the tables of a vector."""
        if offset := self._find_offset(field):
            start = self._table.Vector(offset)
            for index in range(self._table.VectorLen(offset)):
                yield self._follow(start + 4 * index)

    def data(self, field: int) -> memoryview:
        """Return a vector of bytes without copying."""
        return self._read_vector(field, 1)

    def _read_vector(self, field: int, item_bytes: int) -> memoryview:
        if not (offset := self._find_offset(field)):
            return memoryview(b"")
        start, size = self._table.Vector(offset), self._table.VectorLen(offset) * item_bytes
        found: memoryview = self._table.Bytes[start : start + size]
        if found.nbytes != size:
            raise Damaged("truncated file")
        return found

    def integers(self, field: int, dtype: str = "<i4") -> tuple[int, ...]:
        """Return a vector of integers."""
        found = self._read_vector(field, np.dtype(dtype).itemsize)
        self._spend(found.nbytes)
        return tuple(int(one) for one in np.frombuffer(found, dtype))

    def _spend(self, size: int) -> None:
        self._left[0] -= size
        if self._left[0] < 0:
            raise Damaged("corrupt file: repeated references to the same data exceed the limit")

    def _follow(self, place: int) -> Table:
        return Table(self._table.Bytes, int(self._table.Indirect(place)), self._left)


def get_root_table(data: memoryview) -> Table:
    """Return a buffer's root table."""
    return Table(data, struct.unpack_from("<I", data)[0], [_MAX_EXPANSION * data.nbytes])


@dataclass(frozen=True)
class Value:
    """Input or output value of a method."""

    kind: str  # ``tensor``, ``int``, ``bool``, ``double``, ``none``, ``string`` ..
    dtype: str = ""  # for tensors; "" if hil does not support the dtype
    sizes: tuple[int, ...] = ()  # for tensors; the maximum for dynamic sizes
    dynamic: bool = False  # True if the tensor may be smaller; the file does not specify the dimensions
    order: tuple[int, ...] = ()  # tensor dimensions in memory order, outermost first
    # Number that the input always had at export, or value of an output that no instruction writes. None otherwise.
    constant: int | float | bool | None = None


# Operators that draw random numbers.
_DRAWING = frozenset("bernoulli multinomial native_dropout normal rand rand_like randint randn randn_like".split())


@dataclass(frozen=True)
class ExecuTorchMethod:
    """Entry point."""

    name: str
    # inputs, outputs: in order, including values that are not tensors.
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    operators: tuple[str, ...]  # operators called outside delegates: ``aten::add.out``
    backends: tuple[str, ...]  # backends of its delegates: ``XnnpackBackend``
    # (backend, operator) of each delegate or kernel call, in order; the other part is "".
    calls: tuple[tuple[str, str], ...] = ()
    external: tuple[str, ...] = ()  # names of tensors with values in an external file

    @property
    def writers(self) -> tuple[str, ...]:
        """Operators that write into the method's buffers: ``aten::copy_``, ``aten::index_put_``."""
        names = {operator: operator.rpartition("::")[2].partition(".")[0] for operator in self.operators}
        return tuple(one for one, name in names.items() if name.endswith("_") or name.startswith("update_cache"))

    @property
    def random(self) -> tuple[str, ...]:
        """Operators that draw random numbers: ``aten::rand.out``, ``aten::native_dropout.out``."""
        return tuple(one for one in self.operators if one.rpartition("::")[2].partition(".")[0] in _DRAWING)

    def list_input_specs(self) -> list[tuple[int, TensorSpec]]:
        """Return the input tensors with their positions among all inputs, named ``input0``, ``input1``.

        Constants are excluded.

        Raises:
            Damaged: an input is neither a tensor nor a number.
        """
        return self._list_specs("input", self.inputs)

    def list_output_specs(self) -> list[tuple[int, TensorSpec]]:
        """Return the output tensors and numbers, with their positions among all outputs.

        Numbers that no instruction writes are excluded.

        Raises:
            Damaged: an output is not a tensor, a number or none.
        """
        return self._list_specs("output", self.outputs)

    def _list_specs(self, what: str, values: Sequence[Value]) -> list[tuple[int, TensorSpec]]:
        found: list[tuple[int, TensorSpec]] = []
        for place, value in enumerate(values):
            if value.kind == "none" or value.constant is not None:
                continue
            name = f"{what}{len(found)}"
            dtype = value.dtype or _SCALARS.get(value.kind, "")
            if not dtype:
                kind = "tensor of an unknown dtype" if value.kind == "tensor" else value.kind
                raise Damaged(
                    f"{what} {place} of the method {self.name!r} is a {kind}: hil supports only tensors and numbers"
                )
            shape: tuple[Dim, ...] = value.sizes
            if value.dynamic:
                shape = tuple(f"{name}.dim{axis}" if what == "input" else None for axis in range(len(value.sizes)))
            found.append((place, TensorSpec(name, dtype, shape)))
        return found


@dataclass(frozen=True)
class BpteCase:
    """Case in a ``.bpte``: tensors, and numbers for scalar inputs."""

    inputs: tuple[Array | int | float | bool, ...]
    expected_outputs: tuple[Array | int | float | bool, ...]


def map_program(file: Path) -> memoryview:
    """Map a file's bytes, in a worker process: see :func:`hil.core.files.map_file`. Raises Damaged if it is empty."""
    return _require_bytes(map_file(file))


def read_buffer(file: Path) -> memoryview:
    """Read a file that other programs may change. Raises Damaged if the file is empty, and OSError."""
    return _require_bytes(load_file(file))


def _require_bytes(data: memoryview) -> memoryview:
    if not data:
        raise Damaged("the file is empty")
    return data


def is_bundle(data: memoryview) -> bool:
    """Return True if the data begins like a ``.bpte`` of any version."""
    return bytes(data[4:6]) == BUNDLE[:2]


def find_program(data: memoryview) -> memoryview:
    """Return the ``.pte`` program in a file: the whole file, or the program in a ``.bpte``. Raises Damaged."""
    if not is_bundle(data):
        return data
    with convert_parse_errors():
        return _get_root(data, BUNDLE).data(2)


def read_methods(data: memoryview) -> dict[str, ExecuTorchMethod]:
    """Return the methods of a ``.pte`` or ``.bpte``, in order. Raises Damaged if the data is invalid."""
    with convert_parse_errors():
        return {
            method.name: method for method in map(_read_method, _get_root(find_program(data), PROGRAM).iter_tables(1))
        }


def list_tensor_files(folder: Path) -> list[Path]:
    """Return the files in a directory that may contain a program's external tensors."""
    return sorted(file for file in folder.glob(f"*{TENSORS_SUFFIX}") if file.is_file())


def find_tensor_file(program: Path, methods: Mapping[str, ExecuTorchMethod]) -> Path | None:
    """Return the ``.ptd`` file with a program's external tensors from the program's directory.

    The file has the program's name, or is the only file with all external tensors. A file with the program's name is
    used even if the program lists no external tensor, because programs do not list external tensors of delegates.

    Raises:
        Damaged: no file or multiple files have the tensors, or the file with the program's name is invalid.
    """
    wanted = {name for method in methods.values() for name in method.external}
    own = program.with_suffix(TENSORS_SUFFIX)
    if own.is_file():
        if missing := sorted(wanted - _read_tensor_names(own)):
            raise Damaged(f"tensor {missing[0]!r} is stored outside the program, but {own.name} does not contain it")
        return own
    if not wanted:
        return None
    found = []
    for file in list_tensor_files(program.parent):
        with contextlib.suppress(Damaged, OSError):
            found += [file] * (wanted <= _read_tensor_names(file))
    if len(found) != 1:
        which = (
            f"multiple files contain them: {', '.join(one.name for one in found[:3])}"
            if found
            else "no file next to the program contains them"
        )
        raise Damaged(
            f"the program needs a {TENSORS_SUFFIX} file with {len(wanted)} tensors, such as {sorted(wanted)[0]}, but "
            f"{which}; store the right file next to the program, with the name {own.name}"
        )
    return found[0]


def _read_tensor_names(file: Path) -> set[str]:
    with FileReader(file) as reader:
        # Names and layout are at the start. The tensors follow and may have gigabytes.
        data = _require_bytes(reader.read(0, min(reader.size, _MAX_TENSOR_NAMES_BYTES)))
    with convert_parse_errors():
        if bytes(data[4:8]) != TENSORS:
            raise Damaged(f"{file.name} is not an ExecuTorch tensor file")
        return {one.text(0) for one in get_root_table(data).iter_tables(2)}


def pick_method(methods: Mapping[str, ExecuTorchMethod], name: str) -> ExecuTorchMethod | None:
    """Return the named method; for "", the only method or ``forward``. None if missing."""
    if name:
        return methods.get(name)
    return next(iter(methods.values())) if len(methods) == 1 else methods.get(_DEFAULT_METHOD)


def read_cases(data: memoryview) -> dict[str, list[BpteCase]]:
    """Return the cases in a ``.bpte`` by method, in order.

    Raises:
        Damaged: the data is not a ``.bpte``, is truncated or altered, or a tensor's size does not match its shape.
    """
    found: dict[str, list[BpteCase]] = {}
    with convert_parse_errors():
        for suite in _get_root(data, BUNDLE).iter_tables(1):
            found.setdefault(suite.text(0), []).extend(
                BpteCase(*(tuple(_read_bundled(value) for value in case.iter_tables(field)) for field in (0, 1)))
                for case in suite.iter_tables(1)
            )
    return found


def _get_root(data: memoryview, identifier: bytes) -> Table:
    found = bytes(data[4:8])
    if found != identifier:
        kind = "program" if identifier == PROGRAM else "bundled program"
        if found[:2] == identifier[:2]:
            shown = found.decode(errors="replace")
            raise Damaged(f"unsupported ExecuTorch {kind} version {shown!r}, expected {identifier.decode()!r}")
        raise Damaged(f"not an ExecuTorch {kind}")
    return get_root_table(data)


def _read_method(plan: Table) -> ExecuTorchMethod:
    values = list(plan.iter_tables(2))
    operators = [".".join(filter(None, (one.text(0), one.text(1)))) for one in plan.iter_tables(6)]
    backends = [one.text(0) for one in plan.iter_tables(7)]
    written: set[int] = set()
    calls = []
    for instruction in (one for chain in plan.iter_tables(5) for one in chain.iter_tables(2)):
        kind, arguments = instruction.number(0, "Uint8"), instruction.read_table(1)
        if arguments is None:
            continue
        written |= {arguments.number(1, "Int32")} if kind == _MOVE_CALL else set(arguments.integers(1))
        if kind in (_KERNEL_CALL, _DELEGATE_CALL):
            names, number = operators if kind == _KERNEL_CALL else backends, arguments.number(0, "Int32")
            if not 0 <= number < len(names):
                raise Damaged("corrupt file: a method calls a missing operator")
            calls.append(("", names[number]) if kind == _KERNEL_CALL else (names[number], ""))
    places = plan.integers(3), plan.integers(4)
    if any(not 0 <= place < len(values) for place in (*places[0], *places[1])):
        raise Damaged("corrupt file: a method's values are missing")
    return ExecuTorchMethod(
        name=plan.text(0),
        inputs=tuple(_read_value(values[place], is_fixed=True) for place in places[0]),
        outputs=tuple(_read_value(values[place], is_fixed=place not in written) for place in places[1]),
        operators=tuple(dict.fromkeys(operators)),
        backends=tuple(dict.fromkeys(backends)),
        calls=tuple(calls),
        external=tuple(dict.fromkeys(filter(None, map(_read_external, values)))),
    )


def _read_external(value: Table) -> str:
    """Return the name of an external tensor; "" for other values."""
    held = value.read_table(1) if value.number(0, "Uint8") == _KINDS.index("tensor") else None
    more = held.read_table(9) if held is not None else None
    return more.text(1) if more is not None and more.number(2, "Int8") == _EXTERNAL else ""


def _read_value(value: Table, *, is_fixed: bool) -> Value:
    number = value.number(0, "Uint8")
    kind = _KINDS[number] if number < len(_KINDS) else "list"
    held = value.read_table(1)
    if held is None:
        return Value("none")
    if kind != "tensor":
        return Value(kind, constant=_number(kind, held) if is_fixed and kind in _SCALARS else None)
    sizes = held.integers(2)
    order = tuple(held.data(3)) or tuple(range(len(sizes)))
    if not _is_shape(sizes, order):
        raise Damaged("corrupt file: invalid tensor shape")
    return Value(kind, DTYPES.get(held.number(0, "Int8"), ""), sizes, held.number(8, "Int8") != 0, order)


def _is_shape(sizes: Sequence[int], order: Sequence[int]) -> bool:
    fits = len(sizes) <= _MAX_DIMS and min(sizes, default=0) >= 0
    return fits and sorted(order) == list(range(len(sizes)))


def _number(kind: str, held: Table) -> int | float | bool:
    found: int | float | bool = held.number(0, {"int": "Int64", "bool": "Bool", "double": "Float64"}[kind])
    return found


def _read_bundled(value: Table) -> Array | int | float | bool:
    number = value.number(0, "Uint8")
    kind = _BUNDLED_KINDS[number] if number < len(_BUNDLED_KINDS) else ""
    held = value.read_table(1)
    if held is None or not kind:
        raise Damaged("corrupt file: a case has a value of unknown type")
    if kind != "tensor":
        return _number(kind, held)
    sizes, order = held.integers(1), tuple(held.data(3))
    dtype = DTYPES.get(held.number(0, "Int8"), "")
    if not dtype or not _is_shape(sizes, order):
        raise Damaged("a case has a tensor of unknown dtype or shape")
    data, size = held.data(2), count_bytes(dtype, sizes)
    if data.nbytes != size:
        shape = "x".join(map(str, sizes)) or "scalar"
        raise Damaged(f"a case's tensor, {shape} {dtype}, needs {size} bytes, but has {data.nbytes}")
    try:
        return from_bytes(data, dtype, [sizes[axis] for axis in order]).transpose(np.argsort(order))
    except ValueError as error:  # numpy rejects huge strides even if a dimension is 0
        raise Damaged("a case has a tensor of invalid shape") from error
