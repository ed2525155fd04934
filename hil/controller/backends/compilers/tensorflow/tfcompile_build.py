"""Run tfcompile, and then Zig's C++ compiler and linker, in isolated processes.

Zig is one package that compiles and links for all targets with an old C library. It needs no system toolchain.

``python -m hil.controller.backends.compilers.tensorflow.tfcompile_build FOLDER TRIPLE CPU CLASS`` runs
tfcompile from TensorFlow's wheel. tfcompile runs in a new process every time, because XLA reads flags once per process,
and hil must detect a crash.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hil.controller.backends.compilers.tensorflow.tfcompile_graph import CONFIG, GRAPH
from hil.controller.models.compiling import describe_death, run_logged
from hil.controller.models.tensorflow.hlo import make_dump_environment
from hil.controller.storage.screen.texts import line
from hil.controller.storage.sources.packages import find_package_folder
from hil.core.files import copy_file, read_text
from hil.core.processes import make_module_command
from hil.core.scratch import make_temporary_folder
from hil.errors import CompileCrashed, CompileFailed, UsageError

HEADER = "program.h"
CLASS = "hil::Program"
OBJECTS = ("function.o", "constants.o")
ERROR = "error.txt"
_MODULE = "_pywrap_tfcompile"
# Flags as in TensorFlow's saved_model_cli: single-threaded code without calls of missing libraries.
_XLA_FLAGS = "--xla_cpu_multi_thread_eigen=false --xla_cpu_experimental_ynn_fusion_type="
GLUE = "glue.cc"
_FLAGS = "-std=c++17 -O2 -g0 -fPIC -w -fvisibility=hidden -ffunction-sections -fdata-sections -fno-sanitize=all".split()
_LINK_FLAGS = "-shared -s -Wl,--gc-sections -Wl,-z,defs".split()
# Parts of Abseil that the wheel lacks. These headers take precedence over the wheel's headers.
_ADDED_SOURCES = Path(__file__).parent / "xla_runtime"
# Large source files of the runtime that most programs do not need: `dot_lib_f32.cc`, `sort_lib.cc`.
_LIBRARY = re.compile(r"(?P<name>\w+?_lib)(?:_(?P<variant>\w+))?")
_INCLUDED = re.compile(r'#include "xla/backends/cpu/runtime/(\w+_lib)\.h"')
# Calls of these libraries in the program's header: `TypedMatMul<float, ...`, `EigenConv2D<Eigen::half>`.
_CALLED = re.compile(r"internal::(?:TypedMatMul|EigenConv(?P<rank>\dD))<(?P<type>[\w:]+(?:<\w+>)?)")
_TYPES = {
    "float": "f32",
    "double": "f64",
    "Eigen::half": "f16",
    "int32_t": "s32",
    "int8_t": "s8",
    "std::complex<float>": "c64",
    "std::complex<double>": "c128",
}
# Message from LLVM before it compiles for any CPU of the family, or aborts.
_UNKNOWN_CPU = re.compile(r"'(?P<cpu>[^']*)' is not a recognized processor for this target")
_ERROR = re.compile(r"(?:error: |undefined symbol: |ld\.lld: )(?P<what>.*)")

_GLUE = """\
// The functions of a program of hil's runtime xla-aot, around the class that tfcompile generated.
#include "{header}"
#define HIL_API extern "C" __attribute__((visibility("default")))

using Program = {name};

static Program* of(void* program) {{ return static_cast<Program*>(program); }}

HIL_API const char* hil_xla_signature() {{ return {signature}; }}
// Its arguments are set by the caller, and its memory is its own until the process ends.
HIL_API void* hil_xla_new() {{ return new Program(Program::AllocMode::RESULTS_PROFILES_AND_TEMPS_ONLY); }}
HIL_API int64_t hil_xla_argument_size(void* program, int index) {{
  return index < of(program)->num_args() ? of(program)->arg_size(index) : -1;
}}
HIL_API int64_t hil_xla_result_size(void* program, int index) {{
  return index < of(program)->num_results() ? of(program)->result_size(index) : -1;
}}
HIL_API void hil_xla_set(void* program, int index, void* data) {{ of(program)->set_arg_data(index, data); }}
HIL_API int hil_xla_run(void* program) {{ return of(program)->Run(); }}
HIL_API void* hil_xla_result(void* program, int index) {{ return of(program)->result_data(index); }}
"""


def compile_graph(
    source: str, triple: str, cpu: str, cpp_class: str, folder: str, hlo: str, hlo_passes: bool, log: str
) -> None:
    """Run tfcompile on the graph and config in ``source``, and write header and objects to ``folder``.

    Raises:
        CompileFailed: tfcompile rejected the graph (with tfcompile's message), or LLVM does not support the CPU.
        CompileCrashed: tfcompile crashed.
    """
    for name in (GRAPH, CONFIG):
        copy_file(Path(source) / name, Path(folder) / name)
    command = make_module_command(
        "hil.controller.backends.compilers.tensorflow.tfcompile_build", folder, triple, cpu, cpp_class
    )
    with make_dump_environment(hlo, hlo_passes) as flags:
        code, printed = run_logged(command, Path(log), environment=flags)
    if unknown := _UNKNOWN_CPU.search(printed):
        raise CompileFailed(
            f"tfcompile: unknown CPU {unknown['cpu']!r} for {triple}",
            hint="set --target-cpu to a CPU name of LLVM, or omit it to support any CPU of the family",
        )
    refused = Path(folder) / ERROR
    if refused.exists():
        raise CompileFailed(f"tfcompile: {line(read_text(refused), 400)}", detail=_end(printed))
    if code:
        raise CompileCrashed(f"tfcompile died {describe_death(code)}", detail=_end(printed))


def compile_source(source: str, target: str, folder: str, log: str) -> None:
    """Compile a source file of XLA's runtime to ``object.o``. Raises CompileFailed if the C++ compiler fails."""
    _run_zig(["-c", source, "-o", f"{folder}/object.o", *_FLAGS], target, Path(log))


def link(
    program: str, signature: str, cpp_class: str, objects: Sequence[str], target: str, library: str, log: str
) -> None:
    """Link glue code, the program's objects and the runtime's objects to a shared library for a Zig target."""
    with make_temporary_folder("hil-link-") as scratch:
        glue = Path(scratch) / GLUE
        glue.write_text(write_glue(signature, cpp_class))
        made = [str(Path(program) / name) for name in OBJECTS]
        parts = [str(glue), *made, *objects, f"-I{program}", *_FLAGS, *_LINK_FLAGS]
        _run_zig([*parts, "-o", library], target, Path(log))


def write_glue(signature: str, cpp_class: str = CLASS) -> str:
    """Return the C++ source of a program's functions.

    Args:
        signature: Printable ASCII, because the signature may contain names from an untrusted model file.
    """
    # For printable ASCII, a JSON string is a valid C++ string literal.
    return _GLUE.format(header=HEADER, name=cpp_class, signature=json.dumps(signature))


def find_needed_sources(header: str) -> list[Path]:
    """Return the runtime sources that a program needs, according to the header."""
    included, variants = find_needed_variants(header)
    return [source for source in list_runtime_sources() if is_needed(source.stem, included, variants)]


def find_needed_variants(header: str) -> tuple[set[str], set[str]]:
    """Return the large libraries that a header includes, and the variants (``f32``, ``f16_2d``) that it calls.

    ``*`` selects all variants. A call with an unknown type adds ``*``.
    """
    variants = set()
    for called in _CALLED.finditer(header):
        known = _TYPES.get(called["type"])
        variants.add("_".join(filter(None, (known, (called["rank"] or "").lower()))) if known else "*")
    return set(_INCLUDED.findall(header)), variants


def is_needed(stem: str, included: set[str], variants: set[str]) -> bool:
    """Return True if a program needs a runtime source file. Small files are always needed."""
    match = _LIBRARY.fullmatch(stem)
    if match is None or match["name"] == "rng_state_lib":
        return True
    if match["name"] not in included:
        return False
    return match["variant"] is None or match["variant"] in variants or "*" in variants


def list_runtime_sources() -> list[Path]:
    """Return all source files of XLA's runtime: the files in TensorFlow's wheel, and hil's additions."""
    sources = sorted((find_package_folder("tensorflow", "tfcompile") / "xla_aot_runtime_src").rglob("*.cc"))
    if not sources:
        raise UsageError(
            "XLA runtime sources not found in the tensorflow package", hint="install the tensorflow wheel from PyPI"
        )
    return [*sources, *sorted(_ADDED_SOURCES.glob("*.cc"))]


def _run_zig(arguments: Iterable[str], target: str, log: Path) -> None:
    tensorflow = find_package_folder("tensorflow", "tfcompile")
    includes = [
        f"-I{folder}" for folder in (_ADDED_SOURCES, tensorflow / "include", tensorflow / "xla_aot_runtime_src")
    ]
    command = make_module_command("ziglang", "c++", "-target", target, *includes, *arguments)
    with make_temporary_folder("hil-zig-") as scratch:
        code, printed = run_logged(command, log, Path(scratch))
    if code:
        errors = list(dict.fromkeys(match["what"].strip() for match in _ERROR.finditer(printed)))
        raise CompileFailed(
            f"the C++ compiler failed: {'; '.join(errors[:3]) or f'exit code {code}'}", detail=_end(printed)
        )


def _end(printed: str) -> str:
    return "\n".join(printed.splitlines()[-40:])


def main() -> None:
    """Compile the graph in a directory. Write an error message to the same directory."""
    folder, (triple, cpu, cpp_class) = Path(sys.argv[1]), sys.argv[2:5]
    os.environ["XLA_FLAGS"] = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), _XLA_FLAGS)))
    function, constants = (str(folder / name) for name in OBJECTS)
    try:
        _import_tfcompile().Compile(
            graph=str(folder / GRAPH),
            config=str(folder / CONFIG),
            cpp_class=cpp_class,
            target_triple=triple,
            target_cpu=cpu,
            entry_point="hil_program",
            out_function_object=function,
            out_constant_buffers_object=constants,
            out_metadata_object=str(folder / "metadata.o"),
            out_header=str(folder / HEADER),
            gen_name_to_index=False,
            gen_program_shape=False,
        )
    except Exception as error:  # TensorFlow raises many types
        (folder / ERROR).write_text(str(error))
        sys.exit(1)


def _import_tfcompile() -> Any:
    """Import only the wheel's extension module: importing all of TensorFlow takes seconds."""
    spec = importlib.util.spec_from_file_location(
        _MODULE, find_package_folder("tensorflow") / "python" / f"{_MODULE}.so"
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{_MODULE} not found in the tensorflow package")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
