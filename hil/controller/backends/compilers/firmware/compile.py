"""Compile models to firmware of a microcontroller."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.backends.compilers.firmware.linking import (
    EXTRA,
    PACKAGE,
    find_address,
    link_firmware,
    list_sources,
    list_symbols,
    read_elf,
)
from hil.controller.backends.compilers.firmware.local_memory import check_local_memory
from hil.controller.backends.compilers.firmware.schedule import DispatchStep, Fill, Schedule
from hil.controller.backends.compilers.firmware.schedule_interpreter import ScheduleInterpreter
from hil.controller.backends.compilers.firmware.source import write_linker_script, write_model
from hil.controller.backends.compilers.iree import convert_for_iree
from hil.controller.backends.compilers.iree_program import (
    MAIN,
    Source,
    check_target,
    choose_settings,
    describe_source,
    fail,
    prepare,
    run_compiler,
)
from hil.controller.models.compiling import (
    LOG,
    PARAMETERS,
    call_isolated,
    compile_cached,
    convert_compiler_errors,
    report_phase,
)
from hil.controller.models.importers.mlir import parse
from hil.controller.storage.cache import Cache, read_digests
from hil.controller.storage.sources.packages import require_version
from hil.core.chips import Chip, choose_target_flags, parse_chip, split_flags
from hil.core.files import digest_file, read_text
from hil.core.results import Artifact, Model
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import TensorSpec
from hil.errors import CompileFailed, UsageError
from hil.formats.elf32 import Elf32
from hil.formats.firmware import DESCRIPTION, ELF, FLAT, Firmware, FirmwareStep, read_firmware, write_firmware

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hil.controller.models.compiling import CompileOrder

_QUERY = re.compile(r"^(?P<name>[\w$.]+_library_query)\(", re.M)
# Increase when the firmware's protocol or the description changes.
_VERSION = 1


def compile_firmware(model: Model, **order: Unpack[CompileOrder]) -> Artifact:
    """Compile a model to firmware for the chip of a board config, or return the cached firmware.

    Arguments and errors: see :func:`hil.controller.backends.compilers.compile_model`.
    """
    values, flags = split_flags(order["flags"])
    if not values:
        raise UsageError(
            "unknown chip: the board's config has no [mcu] table", hint="see docs/microcontrollers.md for board configs"
        )
    chip = parse_chip(values)
    taken = convert_for_iree(model, flags, order, order["debug_ir"])
    model = taken.model
    if PARAMETERS in model.files:
        raise CompileFailed("the model's weights are in a separate file, which firmware cannot read")
    recipe = choose_settings(model, choose_target_flags(chip.core, taken.flags), order["isolated"].folders)
    zig = require_version(PACKAGE, EXTRA, folders=order["isolated"].folders)
    sources = {path.name: digest_file(path) for path in list_sources(chip)}
    key = Cache.key(
        "firmware",
        program=recipe.key,
        zig=zig,
        chip=repr(chip),
        sources=sources,
        version=_VERSION,
        dims=dict(model.dims),
    )
    specs = [[asdict(spec) for spec in side or ()] for side in (model.inputs, model.outputs)]

    def make(folder: Path) -> None:
        arguments = {
            "source": vars(describe_source(model, recipe.flags)),
            "folder": str(folder.absolute()),
            "values": dict(values),
            "function": model.function,
            "specs": specs,
            "key": key,
            "zig_cache": str(order["cache"].root.absolute() / "zig"),
            "debug_ir": str(order["debug_ir"].absolute()) if order["debug_ir"] else None,
            "log": str(order["log"].absolute()),
        }
        call_isolated(build, arguments, order)

    compiler = f"{recipe.compiler}, zig {zig}"
    meta = {"model": model.name, "compiler": compiler, "flags": list(order["flags"])}
    entry, how = compile_cached(key, meta, order, order["debug_ir"], make, convert_compiler_errors())
    digests = {name: digest for name, digest in read_digests(entry).items() if name != LOG}
    return Artifact(
        runtime=order["runtime"],
        main=DESCRIPTION,
        files={name: entry / name for name in digests},
        digests=digests,
        function=model.function,
        compiler=compiler,
        flags=(*taken.way, *order["flags"]),
        inputs=model.inputs,
        outputs=model.outputs,
        notes=_describe_memory(chip, read_firmware(entry / DESCRIPTION)),
        **how,
    )


def _describe_memory(chip: Chip, firmware: Firmware) -> dict[str, Any]:
    """Return the memory that a firmware needs and the memory of the chip, in bytes."""
    parts = [
        f"{firmware.flash_bytes:,} of {chip.flash.size:,} bytes of flash",
        f"{firmware.ram_bytes:,} of {chip.ram.size:,} bytes of RAM",
    ]
    return {
        "text": ", ".join(parts),
        "flash_bytes": firmware.flash_bytes,
        "ram_bytes": firmware.ram_bytes,
        "chip_flash_bytes": chip.flash.size,
        "chip_ram_bytes": chip.ram.size,
    }


def build(
    source: Mapping[str, Any],
    folder: str,
    values: Mapping[str, str],
    function: str,
    specs: list[list[Mapping[str, Any]]],
    key: str,
    zig_cache: str,
    debug_ir: str | None,
    log: str,
) -> None:
    """Write the firmware of a model to a directory. Runs in an isolated process.

    Args:
        source: fields of a :class:`hil.controller.backends.compilers.iree_program.Source`.
        values: keys of the [mcu] table.
        specs: inputs and outputs of the model.
        key: digest of everything that determines the firmware.
        zig_cache: directory for Zig's compiled libraries.
        debug_ir: directory for the intermediate representations, the C file and the linker script; or None.
    """
    chip = parse_chip(values)
    sides = [tuple(TensorSpec(one["name"], one["dtype"], tuple(one["shape"])) for one in side) for side in specs]
    with make_temporary_folder("hil-firmware-") as name:
        scratch = Path(name)
        kept = Path(debug_ir) if debug_ir else scratch
        schedule, library, query = _compile_library(Source(**source), scratch, kept, function, sides, Path(log))
        digest = hashlib.sha256(key.encode()).digest()
        model, script = kept / "model.c", kept / "firmware.ld"
        model.write_text(write_model(schedule, digest, query))
        script.write_text(write_linker_script(chip))
        report_phase("link")
        elf_path = Path(folder) / ELF
        link_firmware(chip, [model, *library], script, elf_path, Path(zig_cache), Path(log))
        elf = read_elf(elf_path)
        if query:
            check_local_memory(elf, query)
        _describe(chip, digest, schedule, elf, Path(folder))


def _compile_library(
    source: Source, scratch: Path, kept: Path, function: str, specs: list[tuple[TensorSpec, ...]], log: Path
) -> tuple[Schedule, list[Path], str]:
    """Return the schedule, the object files, and the name of their query function ("" without an object file)."""
    module = prepare(source, scratch, scratch, kept / "imported.mlir" if kept != scratch else None)
    library, phases = scratch / "model.o", kept / "phases"
    report_phase("iree-compile")
    flags = [
        *source.flags,
        f"--iree-llvmcpu-static-library-output-path={library}",
        f"--dump-compilation-phases-to={phases}",
    ]
    code, printed = run_compiler(module, scratch / MAIN, flags, scratch, log)
    check_target(_drop_warning(printed))
    if code:
        fail(code, printed)
    text = next(iter(phases.glob("*.hal.mlir")), None)
    if text is None:
        raise CompileFailed("iree-compile did not write the program's schedule", hint="remove --compile-flag options")
    report_phase("schedule")
    schedule = ScheduleInterpreter(parse(str(text))).read_schedule(function, (specs[0], specs[1]))
    if not library.exists():
        return schedule, [], ""  # the program only fills and copies buffers
    query = _QUERY.search(read_text(library.with_suffix(".h")))
    if query is None:
        raise CompileFailed("the static library has no query function")
    return schedule, [library], query["name"]


def _drop_warning(printed: str) -> str:
    """Remove a warning of IREE that does not matter: hil passes the features of the CPU."""
    return "\n".join(line for line in printed.splitlines() if "Resolution of CPU to CPU-features" not in line)


def _describe(chip: Chip, digest: bytes, schedule: Schedule, elf: Elf32, folder: Path) -> None:
    _, image = elf.make_image(range(chip.flash.start, chip.flash.start + chip.flash.size))
    (folder / FLAT).write_bytes(image)
    ram = find_address(elf, "hil_bss_end") - find_address(elf, "hil_stack_bottom")
    names = {DispatchStep: "dispatch", Fill: "fill"}
    steps = tuple(
        FirmwareStep(step.function if isinstance(step, DispatchStep) else "", names.get(type(step), "copy"))
        for step in schedule.steps
    )
    inputs, outputs = schedule.specs
    write_firmware(
        Firmware(
            chip.name,
            digest.hex(),
            zlib.crc32(image),
            chip.tick_hz,
            len(image),
            ram,
            inputs,
            outputs,
            steps,
            tuple(sorted(list_symbols(elf), key=lambda one: one.address)),
        ),
        folder / DESCRIPTION,
    )
