"""What ExecuTorch's files say: the methods of a ``.pte``, and the test cases that a ``.bpte`` bundles with one.

Read without ExecuTorch, so that a host without PyTorch can send such a program to a board, and a board can say what a
program lacks before it is loaded. The schemas (``program.fbs``, ``bundled_program_schema.fbs``) come with ExecuTorch;
fields are numbered as they stand there.

Files are flatbuffers that nobody vouches for: a damaged or hostile one is an error, never a crash or an endless loop.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hil.core.tensors import Array, Dim, TensorSpec, from_bytes, nbytes_of

# The least that a table takes: where its own layout is told.
_TABLE_BYTES = 4
# Writers share what is equal, so that a little is read more than once; a bomb is a small file that tells of a huge one.
_TOLD_OVER = 16
PROGRAM = b"ET12"
BUNDLE = b"BP08"
TENSORS = b"FT01"
# Files of tensors that programs keep outside, as ExecuTorch names them.
TENSORS_SUFFIX = ".ptd"
_DEFAULT_METHOD = "forward"
# ExecuTorch's ScalarType, which is PyTorch's.
DTYPES = {
    **dict(enumerate("uint8 int8 int16 int32 int64 float16 float32 float64".split())),
    11: "bool",
    15: "bfloat16",
    **dict(
        enumerate("float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz uint16 uint32 uint64".split(), start=23)
    ),
}
# The unions KernelTypes (of a program; what follows are lists) and ValueUnion (of a bundle).
_KINDS = ("", "none", "int", "bool", "double", "tensor", "string")
_BUNDLED_KINDS = ("", "tensor", "int", "bool", "double")
_SCALARS = {"int": "int64", "bool": "bool", "double": "float64"}
# KernelCall and DelegateCall name their values in field 1; MoveCall has two fields, a number each.
_KERNEL_CALL, _DELEGATE_CALL, _MOVE_CALL = 1, 2, 3
_EXTERNAL = 1  # of TensorDataLocation
_MOST_DIMS = 32


class Damaged(ValueError):
    """The buffer is cut off, altered, or of a version that is not known; the message says which."""


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """What Python says of bytes that are no flatbuffer becomes :class:`Damaged`."""
    try:
        yield
    # TypeError: flatbuffers' own word for an offset that is out of range.
    except (struct.error, IndexError, UnicodeDecodeError, TypeError, OverflowError) as error:
        raise Damaged("it is cut off or damaged") from error


class Table:
    """A table: fields by number; one that is not there has its default.

    Args:
        left: one number, how many bytes may still be read; shared by all tables that come of the same root.
    """

    def __init__(self, data: memoryview, at: int, left: list[int]) -> None:
        from flatbuffers import number_types, table

        self._table = table.Table(data, at)
        self._types = number_types
        self._left = left
        self._spend(_TABLE_BYTES)

    def _offset(self, field: int) -> int:
        return int(self._table.Offset(4 + 2 * field))

    def number(self, field: int, kind: str, default: int = 0) -> Any:
        """A number: ``Int8``, ``Uint64``, ``Float64``, ``Bool`` ...; ``default`` is the schema's."""
        offset, flags = self._offset(field), getattr(self._types, f"{kind}Flags")
        return self._table.Get(flags, self._table.Pos + offset) if offset else flags.py_type(default)

    def text(self, field: int) -> str:
        """A string; "" by default."""
        offset = self._offset(field)
        return self._table.String(self._table.Pos + offset).decode() if offset else ""

    def table(self, field: int) -> Table | None:
        """A table, or a union's."""
        offset = self._offset(field)
        return self._at(self._table.Pos + offset) if offset else None

    def tables(self, field: int) -> Iterator[Table]:
        """A vector of tables."""
        if offset := self._offset(field):
            start = self._table.Vector(offset)
            for index in range(self._table.VectorLen(offset)):
                yield self._at(start + 4 * index)

    def data(self, field: int) -> memoryview:
        """A vector of bytes, in place."""
        return self._vector(field, 1)

    def _vector(self, field: int, item_bytes: int) -> memoryview:
        if not (offset := self._offset(field)):
            return memoryview(b"")
        start, size = self._table.Vector(offset), self._table.VectorLen(offset) * item_bytes
        found: memoryview = self._table.Bytes[start : start + size]
        if found.nbytes != size:
            raise Damaged("it is cut off")
        return found

    def integers(self, field: int, dtype: str = "<i4") -> tuple[int, ...]:
        """A vector of integers."""
        found = self._vector(field, np.dtype(dtype).itemsize)
        self._spend(found.nbytes)
        return tuple(int(one) for one in np.frombuffer(found, dtype))

    def _spend(self, size: int) -> None:
        self._left[0] -= size
        if self._left[0] < 0:
            raise Damaged("it is damaged: it says the same over and over")

    def _at(self, place: int) -> Table:
        return Table(self._table.Bytes, int(self._table.Indirect(place)), self._left)


def root_table(data: memoryview) -> Table:
    """The table that a buffer begins with."""
    return Table(data, struct.unpack_from("<I", data)[0], [_TOLD_OVER * data.nbytes])


@dataclass(frozen=True)
class Value:
    """What a method takes or gives in one place."""

    kind: str  # ``tensor``, ``int``, ``bool``, ``double``, ``none``, ``string`` ..
    dtype: str = ""  # of a tensor; "" where hil has no such dtype
    sizes: tuple[int, ...] = ()  # of a tensor; the greatest ones where they are dynamic
    dynamic: bool = False  # whether a tensor may be smaller than that; which of its dimensions, the file does not say
    order: tuple[int, ...] = ()  # a tensor's dimensions as they lie in memory, the outermost first
    # the number that an input was exported with, which it must always be given; that of an output which no instruction
    # writes. None for whatever else.
    constant: int | float | bool | None = None


# Operators that draw random numbers.
_DRAWING = frozenset("bernoulli multinomial native_dropout normal rand rand_like randint randn randn_like".split())


@dataclass(frozen=True)
class Method:
    """An entry point."""

    name: str
    # inputs, outputs: in order, those that are no tensors among them.
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    operators: tuple[str, ...]  # what it calls beside its delegates: ``aten::add.out``
    backends: tuple[str, ...]  # what its delegates were compiled for: ``XnnpackBackend``
    # (backend, operator) of each call of a delegate or a kernel, in order, one of the two "".
    calls: tuple[tuple[str, str], ...] = ()
    external: tuple[str, ...] = ()  # the tensors whose values are in a file beside the program, by name

    @property
    def writers(self) -> tuple[str, ...]:
        """The operators that it calls to write into buffers of its own: ``aten::copy_``, ``aten::index_put_``."""
        names = {operator: operator.rpartition("::")[2].partition(".")[0] for operator in self.operators}
        return tuple(one for one, name in names.items() if name.endswith("_") or name.startswith("update_cache"))

    @property
    def random(self) -> tuple[str, ...]:
        """The operators that it calls to draw random numbers: ``aten::rand.out``, ``aten::native_dropout.out``."""
        return tuple(one for one in self.operators if one.rpartition("::")[2].partition(".")[0] in _DRAWING)

    def input_specs(self) -> list[tuple[int, TensorSpec]]:
        """The tensors that it takes, and their places among all inputs; hil calls them ``input0``, ``input1``.

        Constants are not among them.

        Raises:
            Damaged: it takes what is neither a tensor nor a number.
        """
        return self._specs("input", self.inputs)

    def output_specs(self) -> list[tuple[int, TensorSpec]]:
        """The tensors that it gives, and the numbers that its instructions write, and their places among all outputs.

        Raises:
            Damaged: it gives what is neither a tensor, a number nor nothing.
        """
        return self._specs("output", self.outputs)

    def _specs(self, what: str, values: Sequence[Value]) -> list[tuple[int, TensorSpec]]:
        found: list[tuple[int, TensorSpec]] = []
        for place, value in enumerate(values):
            if value.kind == "none" or value.constant is not None:
                continue
            name = f"{what}{len(found)}"
            dtype = value.dtype or _SCALARS.get(value.kind, "")
            if not dtype:
                kind = "tensor of a dtype that hil does not know" if value.kind == "tensor" else value.kind
                raise Damaged(f"{what} {place} of the method {self.name!r} is a {kind}: hil passes tensors")
            shape: tuple[Dim, ...] = value.sizes
            if value.dynamic:
                shape = tuple(f"{name}.dim{axis}" if what == "input" else None for axis in range(len(value.sizes)))
            found.append((place, TensorSpec(name, dtype, shape)))
        return found


@dataclass(frozen=True)
class BundledCase:
    """A case of a ``.bpte``: tensors, and numbers where the method takes one."""

    inputs: tuple[Array | int | float | bool, ...]
    expected_outputs: tuple[Array | int | float | bool, ...]


def mapped(file: Path) -> memoryview:
    """A file's bytes, as it lies on the disk. Raises Damaged: there are none."""
    if not file.stat().st_size:
        raise Damaged("it is empty")
    return np.memmap(file, np.uint8, "r").data


def is_bundle(data: memoryview) -> bool:
    """Whether a file is a ``.bpte`` (of any version) by its first bytes."""
    return bytes(data[4:6]) == BUNDLE[:2]


def program_in(data: memoryview) -> memoryview:
    """The ``.pte`` in a file: all of it, or what a ``.bpte`` bundles. Raises Damaged: it is neither."""
    if not is_bundle(data):
        return data
    with reading():
        return _root(data, BUNDLE).data(2)


def read_methods(data: memoryview) -> dict[str, Method]:
    """The methods of a ``.pte`` or ``.bpte``, in order. Raises Damaged: it is neither, or cut off, or altered."""
    with reading():
        return {method.name: method for method in map(_method, _root(program_in(data), PROGRAM).tables(1))}


def tensor_files(folder: Path) -> list[Path]:
    """The files in a folder that may hold tensors which a program there keeps outside."""
    return sorted(file for file in folder.glob(f"*{TENSORS_SUFFIX}") if file.is_file())


def tensors_beside(program: Path, methods: Mapping[str, Method]) -> Path | None:
    """The ``.ptd`` file in a program's folder that holds the tensors which the program keeps outside.

    It is the one of the program's name, else the only one that has them all. A program that says of no tensor that it
    is outside has one too where a file has its name: what a delegate keeps there, the program does not list.

    Raises:
        Damaged: none holds them, or several do; or one of the program's name is no such file.
    """
    wanted = {name for method in methods.values() for name in method.external}
    own = program.with_suffix(TENSORS_SUFFIX)
    if own.is_file():
        if missing := sorted(wanted - _tensor_names(own)):
            raise Damaged(f"it keeps the tensor {missing[0]!r} outside, and {own.name} has none of that name")
        return own
    if not wanted:
        return None
    found = []
    for file in tensor_files(program.parent):
        with contextlib.suppress(Damaged, OSError):
            found += [file] * (wanted <= _tensor_names(file))
    if len(found) != 1:
        which = f"{' and '.join(one.name for one in found[:3])} have them" if found else "none beside it has them"
        raise Damaged(
            f"it keeps {len(wanted)} tensors ({sorted(wanted)[0]} among them) in a {TENSORS_SUFFIX} file, and {which}: "
            f"put the file beside the program as {own.name}"
        )
    return found[0]


def _tensor_names(file: Path) -> set[str]:
    data = mapped(file)
    with reading():
        if bytes(data[4:8]) != TENSORS:
            raise Damaged(f"{file.name} is no file of ExecuTorch's tensors")
        return {one.text(0) for one in root_table(data).tables(2)}


def pick_method(methods: Mapping[str, Method], name: str) -> Method | None:
    """The method of a name; of "" the only one, or ``forward``. None where there is no such method."""
    if name:
        return methods.get(name)
    return next(iter(methods.values())) if len(methods) == 1 else methods.get(_DEFAULT_METHOD)


def read_cases(data: memoryview) -> dict[str, list[BundledCase]]:
    """The cases that a ``.bpte`` bundles, by method, in order.

    Raises:
        Damaged: it is none, or cut off, or altered; a tensor's data does not fill its shape.
    """
    found: dict[str, list[BundledCase]] = {}
    with reading():
        for suite in _root(data, BUNDLE).tables(1):
            found.setdefault(suite.text(0), []).extend(
                BundledCase(*(tuple(_bundled(value) for value in case.tables(field)) for field in (0, 1)))
                for case in suite.tables(1)
            )
    return found


def _root(data: memoryview, identifier: bytes) -> Table:
    found = bytes(data[4:8])
    if found != identifier:
        kind = "program" if identifier == PROGRAM else "bundled program"
        if found[:2] == identifier[:2]:
            raise Damaged(f"it is an ExecuTorch {kind} of the version {found!r}, not {identifier!r}")
        raise Damaged(f"it is no ExecuTorch {kind}")
    return root_table(data)


def _method(plan: Table) -> Method:
    values = list(plan.tables(2))
    operators = [".".join(filter(None, (one.text(0), one.text(1)))) for one in plan.tables(6)]
    backends = [one.text(0) for one in plan.tables(7)]
    written: set[int] = set()
    calls = []
    for instruction in (one for chain in plan.tables(5) for one in chain.tables(2)):
        kind, arguments = instruction.number(0, "Uint8"), instruction.table(1)
        if arguments is None:
            continue
        written |= {arguments.number(1, "Int32")} if kind == _MOVE_CALL else set(arguments.integers(1))
        if kind in (_KERNEL_CALL, _DELEGATE_CALL):
            names, number = operators if kind == _KERNEL_CALL else backends, arguments.number(0, "Int32")
            if not 0 <= number < len(names):
                raise Damaged("it is damaged: a method calls what is not there")
            calls.append(("", names[number]) if kind == _KERNEL_CALL else (names[number], ""))
    places = plan.integers(3), plan.integers(4)
    if any(not 0 <= place < len(values) for place in (*places[0], *places[1])):
        raise Damaged("it is damaged: a method's values are not there")
    return Method(
        name=plan.text(0),
        inputs=tuple(_value(values[place], is_fixed=True) for place in places[0]),
        outputs=tuple(_value(values[place], is_fixed=place not in written) for place in places[1]),
        operators=tuple(dict.fromkeys(operators)),
        backends=tuple(dict.fromkeys(backends)),
        calls=tuple(calls),
        external=tuple(dict.fromkeys(filter(None, map(_external, values)))),
    )


def _external(value: Table) -> str:
    """The name of a tensor whose values the program does not hold; "" of any other value."""
    held = value.table(1) if value.number(0, "Uint8") == _KINDS.index("tensor") else None
    more = held.table(9) if held is not None else None
    return more.text(1) if more is not None and more.number(2, "Int8") == _EXTERNAL else ""


def _value(value: Table, *, is_fixed: bool) -> Value:
    number = value.number(0, "Uint8")
    kind = _KINDS[number] if number < len(_KINDS) else "list"
    held = value.table(1)
    if held is None:
        return Value("none")
    if kind != "tensor":
        return Value(kind, constant=_number(kind, held) if is_fixed and kind in _SCALARS else None)
    sizes = held.integers(2)
    order = tuple(held.data(3)) or tuple(range(len(sizes)))
    if not _is_shape(sizes, order):
        raise Damaged("it is damaged: a tensor's shape cannot be")
    return Value(kind, DTYPES.get(held.number(0, "Int8"), ""), sizes, held.number(8, "Int8") != 0, order)


def _is_shape(sizes: Sequence[int], order: Sequence[int]) -> bool:
    fits = len(sizes) <= _MOST_DIMS and min(sizes, default=0) >= 0
    return fits and sorted(order) == list(range(len(sizes)))


def _number(kind: str, held: Table) -> int | float | bool:
    found: int | float | bool = held.number(0, {"int": "Int64", "bool": "Bool", "double": "Float64"}[kind])
    return found


def _bundled(value: Table) -> Array | int | float | bool:
    number = value.number(0, "Uint8")
    kind = _BUNDLED_KINDS[number] if number < len(_BUNDLED_KINDS) else ""
    held = value.table(1)
    if held is None or not kind:
        raise Damaged("it is damaged: a case's value is none that is known")
    if kind != "tensor":
        return _number(kind, held)
    sizes, order = held.integers(1), tuple(held.data(3))
    dtype = DTYPES.get(held.number(0, "Int8"), "")
    if not dtype or not _is_shape(sizes, order):
        raise Damaged("a case holds a tensor of a dtype or shape that hil does not know")
    data, size = held.data(2), nbytes_of(dtype, sizes)
    if data.nbytes != size:
        shape = "x".join(map(str, sizes)) or "scalar"
        raise Damaged(f"a case's tensor, {shape} {dtype}, takes {size} bytes and has {data.nbytes}")
    try:
        return from_bytes(data, dtype, [sizes[axis] for axis in order]).transpose(np.argsort(order))
    except ValueError as error:  # what numpy says of strides beyond all numbers, where a dimension is 0
        raise Damaged("a case holds a tensor of a shape that cannot be") from error
