"""Firmware whose only dispatch is a given C function, to plant faults."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

from hil.controller.backends.compilers.firmware.linking import find_address, link_firmware, list_symbols, read_elf
from hil.controller.backends.compilers.firmware.schedule import Buffer, BufferRange, DispatchStep, Schedule
from hil.controller.backends.compilers.firmware.source import write_linker_script, write_model
from hil.core.chips import Chip
from hil.core.tensors import TensorSpec
from hil.formats.firmware import DESCRIPTION, ELF, FLAT, Firmware, FirmwareStep, write_firmware

# A library of IREE's executable library ABI with the function `planted`.
_LIBRARY = """
#include "hil.h"
{code}
static const uint32_t header[4] = {{6}};
static const hil_function functions[] = {{planted}};
static const char *const names[] = {{"planted"}};
static const struct {{
  const void *header;
  uint32_t import_count;
  const void *imports;
  uint32_t function_count;
  const hil_function *functions;
  const void *attributes, *parameters, *occupancy;
  const char *const *names;
}} library = {{header, 0, 0, 1, functions, 0, 0, 0, names}};
const void *planted_query(uint32_t version, const void *environment) {{
  (void)environment;
  return version == 6 ? &library : 0;
}}
"""
SIGNATURE = "int planted(const void *environment, const void *dispatch, const void *workgroup)"


def build_firmware(chip: Chip, body: str, folder: Path, zig_cache: Path, *, before: str = "") -> Firmware:
    """Build firmware whose dispatch has the given C body. Its input and output is one float32."""
    spec = TensorSpec("x", "float32", (1,))
    given, made = Buffer("input", 4), Buffer("transient", 4)
    spans = (BufferRange(given, 0, 4), BufferRange(made, 0, 4))
    step = DispatchStep("planted", (1, 1, 1), (), spans)
    schedule = Schedule([spans[0]], [spans[1]], [], [step], ((spec,), (spec,)), arena=64)
    code = f"{before}\nstatic {SIGNATURE} {{\n(void)environment; (void)dispatch; (void)workgroup;\n{body}\n}}"
    digest = hashlib.sha256(f"{chip.name} {code}".encode()).digest()
    model, library, script = folder / "model.c", folder / "library.c", folder / "firmware.ld"
    model.write_text(write_model(schedule, digest, "planted_query"))
    library.write_text(_LIBRARY.format(code=code))
    script.write_text(write_linker_script(chip))
    log = folder / "log"
    log.touch()
    link_firmware(chip, [model, library], script, folder / ELF, zig_cache, log)
    elf = read_elf(folder / ELF)
    _, image = elf.make_image(range(chip.flash.start, chip.flash.start + chip.flash.size))
    (folder / FLAT).write_bytes(image)
    ram = find_address(elf, "hil_bss_end") - find_address(elf, "hil_stack_bottom")
    firmware = Firmware(
        chip.name,
        digest.hex(),
        zlib.crc32(image),
        chip.tick_hz,
        len(image),
        ram,
        (spec,),
        (spec,),
        (FirmwareStep("planted", "dispatch"),),
        tuple(sorted(list_symbols(elf), key=lambda one: one.address)),
    )
    write_firmware(firmware, folder / DESCRIPTION)
    return firmware
