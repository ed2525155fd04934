"""What happens in the isolated process when many small models are compiled as functions of one program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.backends.compilers.iree_build import check_target, fail, run_compiler
from hil.core.scratch import temporary_folder
from hil.errors import CompileCrashed, CompileFailed

# Where an error is, as iree-compile says it: `error: loc("net.3/fc1"): ...`; in a fused location there are several.
_PLACE = re.compile(r'"(?:graph:)?(?P<function>[\w.]+)(?:/|")')


def build_group(
    members: Sequence[Mapping[str, Any]], flags: Sequence[str], folder: str, log: str
) -> list[dict[str, Any]]:
    """Compile ONNX models together, but for those that do not let themselves be compiled.

    Args:
        members: of each ``model`` (its file), ``dims`` (sizes of symbolic dimensions), ``function`` (what to call it;
            unique) and ``declaration`` (of that function, or None).
        flags: for iree-compile.
        folder: where programs are written.
        log: the file that standard error goes to.

    Returns:
        The programs, mostly one: its ``file`` in the folder, its ``functions``, and what the compiler ``said``. A
        member that is in none of them broke every program it was in, or was left over.

    Raises:
        UsageError: the compiler knows no such flag.
        StorageError: the disk is full.
        CompileFailed: the target names a CPU or a feature that there is not.
    """
    from iree.compiler import ir

    from hil.controller.backends.compilers.onnx_to_mlir import add_to

    module = ir.Module.create(ir.Location.unknown(ir.Context()))
    taken: list[str] = []
    for member in members:
        try:
            add_to(module, Path(member["model"]), member["dims"], member["function"], member["declaration"])
        except Exception as error:  # whatever it is, it is said when the model is compiled alone
            print(f"note: {member['function']} is left out: {type(error).__name__}: {error}", flush=True)
        else:
            taken.append(member["function"])
    programs: list[dict[str, Any]] = []
    open_sets = [taken]
    with temporary_folder("hil-compile-") as scratch:
        while open_sets:
            functions = open_sets.pop()
            if len(functions) < 2:
                continue
            source = Path(scratch) / "group.mlirbc"
            _write(module, functions, source)
            out = Path(folder) / f"{len(programs)}.vmfb"
            # Groups are compiled side by side, so one has one core.
            code, said = run_compiler(source, out, [*flags, "--mlir-disable-threading"], Path(scratch), Path(log))
            check_target(said)
            if not code:
                programs.append({"file": out.name, "functions": functions, "said": said})
                continue
            _raise_what_is_nobodys(code, said)
            if named := _named(said) & set(functions):
                open_sets.append([function for function in functions if function not in named])
            else:
                open_sets += [functions[::2], functions[1::2]]
    return programs


def _write(module: Any, functions: Sequence[str], out: Path) -> None:
    """Write the functions of some members, with the private ones that only they call."""
    from iree.compiler import ir

    part = module.operation.clone()
    for operation in list(part.regions[0].blocks[0].operations):
        name = ir.StringAttr(operation.attributes["sym_name"]).value
        if ".".join(name.split(".")[:2]) not in functions:
            operation.erase()
    with out.open("wb") as file:
        part.write_bytecode(file)


def _raise_what_is_nobodys(code: int, said: str) -> None:
    """Raise the errors that every part of the group would end in as well."""
    try:
        fail(code, said)
    except (CompileFailed, CompileCrashed):
        return


def _named(said: str) -> set[str]:
    """Whom the compiler's errors name."""
    errors = (line.split("error: ", 1)[1] for line in said.splitlines() if "error: loc(" in line)
    places = (text.split("): ", 1)[0] for text in errors)
    return {match["function"] for place in places for match in _PLACE.finditer(place)}
