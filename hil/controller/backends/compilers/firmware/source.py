"""Write the C file and the linker script of a program's firmware."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hil.controller.backends.compilers.firmware.schedule import (
    Buffer,
    BufferRange,
    CopyStep,
    DispatchStep,
    Fill,
    Schedule,
    Step,
)
from hil.core.chips import Chip

_ALIGNMENT = 64


def write_model(schedule: Schedule, digest: bytes, query: str) -> str:
    """Return the C source of a schedule.

    Args:
        digest: 32 bytes that identify the firmware.
        query: name of the library's query function, or "" without a library.
    """
    names = _name_buffers(schedule)
    functions = sorted({step.function for step in _list_dispatches(schedule)})
    lines = ['#include "hil.h"', ""]
    if query:
        # The name may contain characters that C does not allow.
        lines.append(f'extern const void *query(uint32_t, const void *) __asm__("{query}");')
    for buffer in schedule.constants:
        lines.append(f"static const uint8_t {names[id(buffer)]}[] __attribute__((aligned({_ALIGNMENT}))) = {{")
        lines += [f"  {_write_bytes(buffer.data[start : start + 24])}," for start in range(0, buffer.size, 24)]
        lines.append("};" if buffer.size else "0};")
    places = [*(span.buffer for span in schedule.inputs), *schedule.state]
    for buffer in places:
        lines.append(_declare(names[id(buffer)], buffer.size))
    lines.append(_declare("arena", schedule.arena))
    lines.append(f"static uint32_t ticks[{max(1, len(schedule.steps))}];")

    def locate(span: BufferRange) -> str:
        buffer = span.buffer
        if buffer.kind == "transient":
            return f"(void *)(arena + {buffer.offset + span.offset})"
        return f"(void *)({names[id(buffer)]} + {span.offset})"

    for prefix, steps in (("initial", schedule.initial), ("run", schedule.steps)):
        rows = [_write_step(step, f"{prefix}_{place}", functions, locate, lines) for place, step in enumerate(steps)]
        lines += [f"static const struct hil_step {prefix}_steps[] = {{", *(f"  {row}," for row in rows), "};"]
    lines.append("static const char *const names[] = {" + ", ".join(f'"{name}"' for name in functions) + "};")
    lines.append(f"static hil_function functions[{max(1, len(functions))}];")
    for name, spans in (("inputs", schedule.inputs), ("outputs", schedule.outputs)):
        areas = ", ".join(f"{{{locate(span)}, {span.length}}}" for span in spans)
        lines.append(f"static const struct hil_area {name}[] = {{{areas}}};")
    lines.append(
        "const struct hil_program hil_program = {\n"
        f"  .digest = {{{_write_bytes(digest)}}},\n"
        f"  .query = {'query' if query else 0},\n"
        f"  .names = names, .functions = functions, .function_count = {len(functions)},\n"
        f"  .initial = initial_steps, .initial_count = {len(schedule.initial)},\n"
        f"  .steps = run_steps, .step_count = {len(schedule.steps)}, .ticks = ticks,\n"
        f"  .inputs = inputs, .input_count = {len(schedule.inputs)},\n"
        f"  .outputs = outputs, .output_count = {len(schedule.outputs)},\n"
        "};"
    )
    return "\n".join(lines) + "\n"


def write_linker_script(chip: Chip) -> str:
    """Return the linker script. The stack is at the start of RAM, so that an overflow leaves RAM and faults."""
    flash, ram = chip.flash, chip.ram
    is_apart = chip.vectors is not None and not flash.start <= chip.vectors < flash.start + flash.size
    vectors = f".vectors {chip.vectors:#x} : {{ KEEP(*(.vectors)) }}" if is_apart else ""
    return f"""ENTRY(hil_vectors)
MEMORY {{
  FLASH (rx) : ORIGIN = {flash.start:#x}, LENGTH = {flash.size:#x}
  RAM (rwx) : ORIGIN = {ram.start:#x}, LENGTH = {ram.size:#x}
}}
SECTIONS {{
  {vectors}
  .text : {{
    hil_image_start = .;
    KEEP(*(.vectors))
    *(.text .text.*)
    *(.rodata .rodata.* .srodata .srodata.*)
    . = ALIGN(8);
  }} > FLASH
  .stack (NOLOAD) : {{
    hil_stack_bottom = .;
    . += {chip.stack};
    hil_stack_top = .;
    . += 1024;
    hil_emergency_top = .;
    KEEP(*(.noinit))
    . = ALIGN(64);
  }} > RAM
  .data : {{
    hil_data_start = .;
    *(.data .data.* .sdata .sdata.* .got .got.*)
    . = ALIGN(8);
    hil_data_end = .;
  }} > RAM AT > FLASH
  hil_data_image = LOADADDR(.data);
  hil_image_end = LOADADDR(.data) + SIZEOF(.data);
  PROVIDE(__global_pointer$ = hil_data_start + 0x800);
  .bss (NOLOAD) : {{
    hil_bss_start = .;
    *(.bss .bss.* .sbss .sbss.* COMMON)
    . = ALIGN(8);
    hil_bss_end = .;
  }} > RAM
  /DISCARD/ : {{ *(.ARM.exidx* .ARM.attributes .comment .eh_frame .eh_frame_hdr) }}
}}
"""


def _declare(name: str, size: int) -> str:
    return f"static uint8_t {name}[{max(1, size)}] __attribute__((aligned({_ALIGNMENT})));"


def _name_buffers(schedule: Schedule) -> dict[int, str]:
    groups: list[tuple[str, Sequence[Buffer]]] = [
        ("input", [span.buffer for span in schedule.inputs]),
        ("constant", schedule.constants),
        ("state", schedule.state),
    ]
    return {id(buffer): f"{prefix}_{place}" for prefix, group in groups for place, buffer in enumerate(group)}


def _list_dispatches(schedule: Schedule) -> list[DispatchStep]:
    return [step for step in (*schedule.initial, *schedule.steps) if isinstance(step, DispatchStep)]


def _write_bytes(data: bytes) -> str:
    return ",".join(map(str, data))


def _write_step(
    step: Step, name: str, functions: Sequence[str], locate: Callable[[BufferRange], str], lines: list[str]
) -> str:
    """Add the arrays of a step to the lines, and return its row."""
    spans: tuple[BufferRange, ...]
    words: tuple[int, ...] = ()
    if isinstance(step, DispatchStep):
        spans, words = step.bindings, step.constants
        x, y, z = step.counts
        more = (
            f".kind = HIL_DISPATCH, .function = {functions.index(step.function)}, "
            f".size_x = {x}, .size_y = {y}, .size_z = {z}, .constant_count = {len(words)}"
        )
    elif isinstance(step, Fill):
        spans = (step.target,)
        words = (int.from_bytes(step.pattern, "little"),)
        more = f".kind = HIL_FILL, .pattern_length = {len(step.pattern)}"
    else:
        assert isinstance(step, CopyStep)
        spans, more = (step.target, step.source), ".kind = HIL_COPY"
    if spans:
        lines.append(f"static void *const {name}_bindings[] = {{{', '.join(map(locate, spans))}}};")
        lines.append(f"static const size_t {name}_lengths[] = {{{', '.join(str(span.length) for span in spans)}}};")
        more += f", .bindings = {name}_bindings, .lengths = {name}_lengths, .binding_count = {len(spans)}"
    if words:
        lines.append(f"static const uint32_t {name}_constants[] = {{{', '.join(f'{word}u' for word in words)}}};")
        more += f", .constants = {name}_constants"
    return f"{{{more}}}"
