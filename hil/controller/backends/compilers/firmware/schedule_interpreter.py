"""Read the static schedule of a program from IREE's HAL dialect.

The module is interpreted with unknown tensor contents. The result is a list of fills, copies and dispatches on buffers
with fixed addresses. An operation that depends on the content of a tensor, or that needs IREE's runtime, has no static
schedule.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hil.controller.backends.compilers.firmware.schedule import (
    MAX_STEPS,
    Buffer,
    BufferRange,
    CopyStep,
    DispatchStep,
    Fill,
    Schedule,
    Step,
    list_spans,
    place_buffers,
)
from hil.controller.backends.compilers.firmware.static_values import (
    make_static_error,
    need_numbers,
    read_bytes,
    read_constant,
)
from hil.core.tensors import TensorSpec, count_bytes
from hil.errors import CompileFailed

# An operation count that no real program reaches: a loop with constant bounds may still be endless.
_MAX_OPERATIONS = 5_000_000


@dataclass(eq=False)
class _View:
    span: BufferRange
    shape: Sequence[Any]
    dtype: str


@dataclass(eq=False)
class _Commands:
    steps: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class _Slot:
    """Binding of a reusable command buffer, by number."""

    number: int


class ScheduleInterpreter:
    """Interpret the HAL module of a program.

    Values are integers, buffers, views, command buffers, constants (bytes), or opaque names of devices and fences.
    """

    def __init__(self, module: Any) -> None:
        self._module = module  # the operations do not keep it alive
        self._globals: dict[str, Any] = {}
        self._functions: dict[str, Any] = {}
        self._initializers: list[Any] = []
        self._steps: list[Step] = []
        self._buffers: list[Buffer] = []
        self._initializes = True
        self._count = 0
        for one in module.body.operations:
            operation = one.operation
            if operation.name in ("util.func",):
                self._functions[_text(operation, "sym_name")] = operation
            elif operation.name == "util.initializer":
                self._initializers.append(operation)
            elif operation.name == "util.global" and "initial_value" in operation.attributes:
                self._globals[_text(operation, "sym_name")] = read_constant(operation.attributes["initial_value"])

    def read_schedule(self, function: str, specs: tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]) -> Schedule:
        """Return the schedule of a function.

        Raises:
            CompileFailed: the program has no static schedule.
        """
        for one in self._initializers:
            self._run_region(one.regions[0], [])
        initial, self._steps, self._initializes = self._steps, [], False
        inputs = [
            _View(BufferRange(Buffer("input", size := _measure(spec)), 0, size), spec.shape, spec.dtype)
            for spec in specs[0]
        ]
        name = f"{function}$async" if f"{function}$async" in self._functions else function
        if name not in self._functions:
            raise CompileFailed(f"function {function!r} not found in the compiled program")
        entry = self._functions[name].regions[0]
        extra = len(entry.blocks[0].arguments) - len(inputs)
        results = self._run_region(entry, [*inputs, *[None] * extra])
        outputs = []
        for result in results:
            if not isinstance(result, _View):
                raise make_static_error("util.return", "returns a number, not a tensor")
            outputs.append(result.span)
        sizes = [span.length for span in outputs], [_measure(spec) for spec in specs[1]]
        if sizes[0] != sizes[1]:
            raise CompileFailed(
                f"the program returns tensors of {sizes[0]} bytes, but the model's have {sizes[1]} bytes"
            )
        used = [self._steps, initial]
        buffers = {id(span.buffer): span.buffer for steps in used for step in steps for span in list_spans(step)}
        buffers |= {id(span.buffer): span.buffer for span in outputs}
        constants = [one for one in buffers.values() if one.kind == "constant"]
        state = [one for one in buffers.values() if one.kind == "state"]
        for span in outputs:
            span.buffer.last = None
        _check_spans(self._steps)
        arena = place_buffers([one for one in buffers.values() if one.kind == "transient"])
        return Schedule([one.span for one in inputs], outputs, initial, self._steps, specs, constants, state, arena)

    def _run_region(self, region: Any, arguments: Sequence[Any]) -> list[Any]:
        values: dict[Any, Any] = {}
        block = region.blocks[0]
        while True:
            for argument, value in zip(block.arguments, arguments, strict=True):
                values[argument] = value
            for one in block.operations:
                operation = one.operation
                self._count += 1
                if self._count > _MAX_OPERATIONS or len(self._steps) > MAX_STEPS:
                    raise make_static_error(operation.name, "is in a loop with too many steps")
                given = [values[operand] for operand in operation.operands]
                name = operation.name
                if name in ("util.return", "func.return"):
                    return given
                if name in ("cf.br", "cf.cond_br"):
                    block, arguments = _branch(operation, given)
                    break
                if name == "util.call":
                    callee = _text(operation, "callee").lstrip("@")
                    results: Sequence[Any] = self._run_region(self._functions[callee].regions[0], given)
                else:
                    results = self._run(operation, given)
                for result, value in zip(operation.results, results, strict=True):
                    values[result] = value
            else:
                return []

    def _run(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        name = operation.name
        if name in _IGNORED:
            return [None] * len(operation.results)
        if name in _ARITHMETIC:
            return [_ARITHMETIC[name](*need_numbers(name, given))]
        handler = _HANDLERS.get(name)
        if handler is None:
            raise make_static_error(name, "is not supported by firmware")
        return handler(self, operation, given)

    # ---- Values
    def _constant(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        return [read_constant(operation.attributes["value"])]

    def _compare(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        left, right = need_numbers(operation.name, given)
        return [int(_PREDICATES[int(operation.attributes["predicate"].value)](left, right))]

    def _compare_objects(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        return [int(given[0] is given[1])]

    def _select(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        (condition,) = need_numbers(operation.name, given[:1])
        return [given[1] if condition else given[2]]

    def _cast(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        return given

    def _load_global(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        return [self._globals.get(_text(operation, "global").lstrip("@"))]

    def _store_global(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        if not self._initializes:
            value = given[0]
            if not isinstance(value, Buffer) or value is not self._globals.get(_text(operation, "global").lstrip("@")):
                raise make_static_error(operation.name, "replaces state while the program runs")
        self._globals[_text(operation, "global").lstrip("@")] = given[0]
        return []

    def _count_devices(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        return [1]

    def _get_device(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        return ["device"]

    def _query_device(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        # The only device is a local one that takes static executables.
        asked = (_text(operation, "category"), _text(operation, "key"))
        known = {("hal.device.id", "local*"): 1, ("hal.executable.format", "static"): 1}
        value = known.get(asked, 1 if asked == ("hal.dispatch", "concurrency") else 0)
        return [int(asked in known), value]

    def _lookup_function(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        return [_text(operation, "entry_point").rpartition("::@")[2].strip('"')]

    # ---- Buffers
    def _new(self, kind: str, size: Any, name: str) -> Buffer:
        (number,) = need_numbers(name, [size])
        if self._initializes and kind == "transient":
            kind = "state"
        buffer = Buffer(kind, number, first=len(self._steps))
        self._buffers.append(buffer)
        return buffer

    def _constant_buffer(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        data = read_bytes(operation.attributes["value"])
        return [Buffer("constant", len(data), data)]

    def _import_buffer(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        source, offset, length = given[4], *need_numbers(operation.name, given[5:7])
        if offset == 0 and length == source.size:
            return [1, source]
        return [1, Buffer("constant", length, source.data[offset : offset + length])]

    def _allocate(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        return [self._new("transient", given[-1], operation.name)]

    def _free(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        buffer = next((one for one in given if isinstance(one, Buffer)), None)
        if buffer is not None and buffer.kind == "transient":
            buffer.last = len(self._steps)
        return []

    def _subspan(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        offset, length = need_numbers(operation.name, given[1:3])
        return [_resolve(given[0], offset, length)]

    def _get_buffer(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        view = given[0]
        if not isinstance(view, _View):
            raise make_static_error(operation.name, "takes a value that is not a tensor")
        return [view.span]

    def _create_view(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        offset, length = need_numbers(operation.name, given[1:3])
        shape = tuple(need_numbers(operation.name, given[5:]))
        return [_View(_resolve(given[0], offset, length), shape, str(given[3]))]

    def _element_type(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        return [str(operation.attributes["type"])]

    # ---- Commands
    def _create_commands(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        return [_Commands()]

    def _fill(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        commands, target, offset, length, pattern = given
        offset, length, pattern = need_numbers(operation.name, [offset, length, pattern])
        commands.steps.append((Fill, _resolve(target, offset, length), _make_pattern(operation, 4, pattern)))
        return []

    def _copy(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        commands, source, source_offset, target, target_offset, length = given
        source_offset, target_offset, length = need_numbers(operation.name, [source_offset, target_offset, length])
        commands.steps.append(
            (CopyStep, _resolve(target, target_offset, length), _resolve(source, source_offset, length))
        )
        return []

    def _update(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        commands, source, _, source_offset, target, target_offset, length = given
        source_offset, target_offset, length = need_numbers(operation.name, [source_offset, target_offset, length])
        data = source.data[source_offset : source_offset + length]
        commands.steps.append(
            (
                CopyStep,
                _resolve(target, target_offset, length),
                BufferRange(Buffer("constant", length, data), 0, length),
            )
        )
        return []

    def _dispatch(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        parts = _split(given, operation.attributes["operandSegmentSizes"])
        (commands,), _, (function,), *rest = parts
        (x,), (y,), (z,), constants, buffers, offsets, lengths = rest
        x, y, z, *constants = need_numbers(operation.name, [x, y, z, *constants])
        spans = [
            _resolve(buffer, *need_numbers(operation.name, [offset, length]))
            for buffer, offset, length in zip(buffers, offsets, lengths, strict=True)
        ]
        words = tuple(number % (1 << 32) for number in constants)
        commands.steps.append((DispatchStep, function, (x, y, z), words, *spans))
        return []

    def _execute(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        commands = next(one for one in given if isinstance(one, _Commands))
        after = given[given.index(commands) + 1 :]
        buffers, numbers = after[: len(after) // 3], need_numbers(operation.name, after[len(after) // 3 :])
        offsets, lengths = numbers[: len(buffers)], numbers[len(buffers) :]
        bound = [_resolve(*one) for one in zip(buffers, offsets, lengths, strict=True)]
        for kind, *values in commands.steps:
            settled = [_settle(value, bound) for value in values]
            if kind is DispatchStep:
                function, counts, constants, *spans = settled
                self._steps.append(DispatchStep(function, counts, constants, tuple(spans)))
            else:
                self._steps.append(kind(*settled))
        return []

    def _queue_fill(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        target, offset, length, pattern = given[4:8]
        offset, length, pattern = need_numbers(operation.name, [offset, length, pattern])
        self._steps.append(Fill(_resolve(target, offset, length), _make_pattern(operation, 7, pattern)))
        return []

    def _queue_copy(self, operation: Any, given: list[Any]) -> Sequence[Any]:
        source, source_offset, target, target_offset, length = given[4:9]
        source_offset, target_offset, length = need_numbers(operation.name, [source_offset, target_offset, length])
        self._steps.append(CopyStep(_resolve(target, target_offset, length), _resolve(source, source_offset, length)))
        return []


def _make_pattern(operation: Any, place: int, number: int) -> bytes:
    """Return the bytes of a fill's pattern, an operand of type i8, i16 or i32."""
    width = int(str(operation.operands[place].type).removeprefix("i")) // 8
    return (number % (1 << 8 * width)).to_bytes(width, "little")


def _check_spans(steps: Sequence[Step]) -> None:
    """Raise CompileFailed if a step uses bytes outside of a buffer, or a buffer that is not allocated."""
    for number, step in enumerate(steps):
        for span in list_spans(step):
            buffer = span.buffer
            if span.offset < 0 or span.offset + span.length > buffer.size:
                raise make_static_error("hal.buffer.subspan", "exceeds its buffer")
            is_late = buffer.last is not None and number >= buffer.last
            if buffer.kind == "transient" and (number < buffer.first or is_late):
                raise make_static_error("hal.device.queue.dealloca", "frees a buffer that the program still uses")


def _text(operation: Any, name: str) -> str:
    return str(operation.attributes[name]).strip('"')


def _branch(operation: Any, given: list[Any]) -> tuple[Any, list[Any]]:
    if operation.name == "cf.br":
        return operation.successors[0], given
    (condition,), first, second = _split(given, operation.attributes["operandSegmentSizes"])
    (taken,) = need_numbers(operation.name, [condition])
    return (operation.successors[0], first) if taken else (operation.successors[1], second)


def _measure(spec: TensorSpec) -> int:
    """Return the bytes of a tensor."""
    sizes = [dim for dim in spec.shape if isinstance(dim, int)]
    if len(sizes) != len(spec.shape):
        raise make_static_error("func.func", f"takes the tensor {spec.name}, whose size is not fixed")
    return count_bytes(spec.dtype, sizes)


def _split(given: list[Any], sizes: Any) -> list[list[Any]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(given[start : start + size])
        start += size
    return parts


def _resolve(target: Any, offset: int, length: int) -> Any:
    """Return a range of a buffer, of a range, or of a numbered binding."""
    if isinstance(target, int):
        return (_Slot(target), offset, length)
    if isinstance(target, BufferRange):
        return BufferRange(target.buffer, target.offset + offset, length)
    if isinstance(target, Buffer):
        return BufferRange(target, offset, length)
    raise make_static_error("hal.buffer", "uses an unknown buffer")


def _settle(value: Any, bound: Sequence[BufferRange]) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], _Slot):
        slot, offset, length = value
        return _resolve(bound[slot.number], offset, length)
    return value


_ARITHMETIC: dict[str, Callable[..., int]] = {
    "arith.addi": operator.add,
    "arith.subi": operator.sub,
    "arith.muli": operator.mul,
    "arith.andi": operator.and_,
    "arith.ori": operator.or_,
    "arith.xori": operator.xor,
    "arith.divsi": lambda a, b: int(a / b),
    "arith.divui": operator.floordiv,
    "arith.remui": operator.mod,
    "arith.ceildivui": lambda a, b: -(-a // b),
    "arith.ceildivsi": lambda a, b: -(-a // b),
    "arith.maxsi": max,
    "arith.minsi": min,
    "arith.maxui": max,
    "arith.minui": min,
    "util.align": lambda a, b: -(-a // b) * b,
}
# arith.cmpi: eq, ne, slt, sle, sgt, sge, ult, ule, ugt, uge. Sizes are never negative.
_PREDICATES = (
    operator.eq,
    operator.ne,
    *(operator.lt, operator.le, operator.gt, operator.ge) * 2,
)
_IGNORED = frozenset(
    """
    hal.buffer.assert hal.buffer_view.assert hal.buffer_usage hal.memory_type hal.encoding_type hal.device.allocator
    hal.fence.create hal.fence.join hal.fence.await hal.fence.signal hal.command_buffer.execution_barrier
    hal.command_buffer.finalize hal.device.queue.barrier hal.device.queue.flush util.status.check_ok
    hal.executable.create hal.executable_end
    hal.command_buffer.begin_debug_group hal.command_buffer.end_debug_group util.null
    """.split()
)
_HANDLERS: dict[str, Callable[[ScheduleInterpreter, Any, list[Any]], Sequence[Any]]] = {
    "arith.constant": ScheduleInterpreter._constant,
    "arith.cmpi": ScheduleInterpreter._compare,
    "arith.select": ScheduleInterpreter._select,
    "arith.index_cast": ScheduleInterpreter._cast,
    "arith.index_castui": ScheduleInterpreter._cast,
    "arith.extui": ScheduleInterpreter._cast,
    "arith.trunci": ScheduleInterpreter._cast,
    "util.optimization_barrier": ScheduleInterpreter._cast,
    "util.cmp.eq": ScheduleInterpreter._compare_objects,
    "util.global.load": ScheduleInterpreter._load_global,
    "util.global.store": ScheduleInterpreter._store_global,
    "util.buffer.constant": ScheduleInterpreter._constant_buffer,
    "hal.devices.count": ScheduleInterpreter._count_devices,
    "hal.devices.get": ScheduleInterpreter._get_device,
    "hal.device.query": ScheduleInterpreter._query_device,
    "hal.executable.lookup.function": ScheduleInterpreter._lookup_function,
    "hal.allocator.import": ScheduleInterpreter._import_buffer,
    "hal.allocator.allocate": ScheduleInterpreter._allocate,
    "hal.device.queue.alloca": ScheduleInterpreter._allocate,
    "hal.device.queue.dealloca": ScheduleInterpreter._free,
    "hal.buffer.subspan": ScheduleInterpreter._subspan,
    "hal.buffer_view.buffer": ScheduleInterpreter._get_buffer,
    "hal.buffer_view.create": ScheduleInterpreter._create_view,
    "hal.element_type": ScheduleInterpreter._element_type,
    "hal.command_buffer.create": ScheduleInterpreter._create_commands,
    "hal.command_buffer.fill_buffer": ScheduleInterpreter._fill,
    "hal.command_buffer.copy_buffer": ScheduleInterpreter._copy,
    "hal.command_buffer.update_buffer": ScheduleInterpreter._update,
    "hal.command_buffer.dispatch": ScheduleInterpreter._dispatch,
    "hal.device.queue.execute": ScheduleInterpreter._execute,
    "hal.device.queue.execute.indirect": ScheduleInterpreter._execute,
    "hal.device.queue.fill": ScheduleInterpreter._queue_fill,
    "hal.device.queue.copy": ScheduleInterpreter._queue_copy,
}
