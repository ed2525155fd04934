"""Dump XLA's modules (HLO) for TensorFlow functions, before and after optimisation, as text and graphs.

``python -m hil.controller.models.tensorflow.hlo MODEL FUNCTION DIMS`` compiles a function with XLA for this machine. A
separate process is needed because XLA reads its flags only at start-up.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from hil.controller.models.compiling import describe_death, run_logged
from hil.core.files import copy_file
from hil.core.processes import make_module_command
from hil.core.scratch import make_temporary_folder

# Subdirectory of ``--debug-ir`` for XLA's files.
HLO = "hlo"
_FLAGS = "--xla_dump_hlo_as_text --xla_dump_hlo_as_dot"
# Names of XLA's files, such as `module_0007.a_inference_flat_42__.5.cpu_after_optimizations.txt` and
# `module_0007.a_inference_flat_42__.5.0012.simplification.after_algsimp.before_dce.txt`
_DUMPED = re.compile(
    r"module_(?P<number>\d+)\..+?\.(?:(?:cpu_)?(?P<what>(?:before|after)_optimizations.*)|(?P<pass>\d{4}\..+))"
)
PASSES = "passes"


@contextlib.contextmanager
def make_dump_environment(folder: str, passes: bool = False) -> Iterator[dict[str, str]]:
    """Yield the environment variables with which XLA dumps modules to a directory; "" disables the dump.

    The files are ``before_optimizations`` and ``after_optimizations``, as ``.txt`` and ``.dot``, and further files that
    XLA writes for these modules. If a process compiled several modules, the names start with a number. With ``passes``,
    a subdirectory ``passes`` contains the module after each pass.
    """
    if not folder:
        yield {}
        return
    with make_temporary_folder("hil-hlo-") as scratch:
        flags = f"--xla_dump_to={scratch} {_FLAGS}{' --xla_dump_hlo_pass_re=.*' if passes else ''}"
        yield {"XLA_FLAGS": " ".join(filter(None, (os.environ.get("XLA_FLAGS"), flags)))}
        written = sorted(path.name for path in Path(scratch).iterdir())
        found = [match for name in written if (match := _DUMPED.fullmatch(name))]
        several = len({match["number"] for match in found}) > 1
        for match in found:
            name = match["what"] or match["pass"]
            place = Path(folder) if match["what"] else Path(folder, PASSES)
            place.mkdir(parents=True, exist_ok=True)
            copy_file(Path(scratch, match[0]), place / (f"{match['number']}.{name}" if several else name))


def write_hlo(path: str, function: str, dims: Mapping[str, int], folder: str, log: str, passes: bool = False) -> None:
    """Dump the HLO of a model's function, compiled for this machine, below a directory. Errors go to the log."""
    command = make_module_command("hil.controller.models.tensorflow.hlo", path, function, json.dumps(dict(dims)))
    with make_dump_environment(str(Path(folder, HLO)), passes) as flags:
        code, _ = run_logged(command, Path(log), environment=flags)
    if code:
        print(f"XLA died {describe_death(code)}: incomplete modules in {folder}", flush=True)


def main() -> None:
    """Compile a function of a model, so that XLA dumps it."""
    import tensorflow as tf

    from hil.controller.models.tensorflow.source import name_outputs, open_model

    path, function, dims = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    source = open_model(path, function, dims)

    def call_flat(*tensors: object) -> list[object]:
        return [tf.identity(leaf) for _, leaf in name_outputs(source.call(list(tensors)))]

    compiled = tf.function(call_flat, jit_compile=True, autograph=False)
    compiled.experimental_get_compiler_ir(*source.list_sized_inputs())(stage="optimized_hlo")


if __name__ == "__main__":
    main()
