"""The interpreter refuses what it cannot place in static memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.backends.compilers.firmware.schedule import Fill, Schedule
from hil.controller.backends.compilers.firmware.schedule_interpreter import ScheduleInterpreter
from hil.controller.models.importers.mlir import parse
from hil.core.tensors import TensorSpec
from hil.errors import CompileFailed

pytest.importorskip("iree.compiler")
SPEC = TensorSpec("y", "float32", (4,))
ALLOCATE = (
    "%{0} = hal.device.queue.alloca<%d : !hal.device> affinity(%a) wait(%f) signal(%f) pool(%p) type(%m) usage(%u) "
    'flags("None") : !hal.buffer{{%c16}}'
)
FREE = (
    "hal.device.queue.dealloca<%d : !hal.device> affinity(%a) wait(%f) signal(%f) buffer(%{0} : !hal.buffer) "
    'flags("None")'
)
FILL = (
    "hal.device.queue.fill<%d : !hal.device> affinity(%a) wait(%f) signal(%f) target(%{0} : !hal.buffer)[%c0] "
    'length({1}) pattern({2}) flags("None")'
)
MODULE = """
util.func public @main$async(%w: !hal.fence, %s: !hal.fence) -> !hal.buffer_view {{
  %c0 = arith.constant 0 : index
  %c16 = arith.constant 16 : index
  %c32 = arith.constant 32 : index
  %v32 = arith.constant -2 : i32
  %p = arith.constant 0 : i64
  %a = arith.constant -1 : i64
  %d = hal.devices.get %c0 : !hal.device
  %f = util.null : !hal.fence
  %m = hal.memory_type<"DeviceLocal"> : i32
  %u = hal.buffer_usage<"Transfer"> : i32
  %t = hal.element_type<f32> : i32
  %e = hal.encoding_type<dense_row_major> : i32
  {body}
  %view = hal.buffer_view.create buffer(%y : !hal.buffer)[%c0, %c16] shape([%c16]) type(%t) encoding(%e)
    : !hal.buffer_view
  util.return %view : !hal.buffer_view
}}
"""


def read(folder: Path, *body: str, spec: TensorSpec = SPEC) -> Schedule:
    file = folder / "module.mlir"
    file.write_text(MODULE.format(body="\n  ".join([ALLOCATE.format("y"), *body])))
    return ScheduleInterpreter(parse(str(file))).read_schedule("main", ((), (spec,)))


def test_buffers_in_use_at_once_have_different_places(tmp_path: Path) -> None:
    used = [FILL.format(name, "%c16", "%v32 : i32") for name in ("x", "y")]
    barrier = "%n = util.optimization_barrier %v32 : i32"
    schedule = read(
        tmp_path, barrier, ALLOCATE.format("x"), *used, FREE.format("x"), FILL.format("y", "%c16", "%n : i32")
    )
    places = []
    for step in schedule.steps:
        assert isinstance(step, Fill) and step.pattern == b"\xfe\xff\xff\xff"
        places.append(step.target.buffer.offset)
    assert places[1] == places[2] != places[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([FILL.format("y", "%c32", "%v32 : i32")], "exceeds its buffer"),
        (
            [ALLOCATE.format("x"), FREE.format("x"), FILL.format("x", "%c16", "%v32 : i32")],
            "frees a buffer that the program still uses",
        ),
    ],
)
def test_unsafe_use_of_a_buffer_is_an_error(tmp_path: Path, body: list[str], message: str) -> None:
    with pytest.raises(CompileFailed, match=message):
        read(tmp_path, *body)


def test_output_of_another_size_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CompileFailed, match=r"tensors of \[16\] bytes, but the model's have \[20\] bytes"):
        read(tmp_path, spec=TensorSpec("y", "float32", (5,)))
