"""XLA's modules (HLO) of what TensorFlow compiles, before and after XLA optimised them, as text and as graphs.

``python -m hil.controller.models.tensorflow.hlo MODEL FUNCTION DIMS`` compiles a function with XLA for this machine, in
a process of its own: XLA reads its flags once in the life of a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from hil.controller.models.compiling import death_text, run_logged
from hil.core.processes import module_command
from hil.core.scratch import temporary_folder

# The folder of ``--debug-ir`` in which all that lies.
HLO = "hlo"
_FLAGS = "--xla_dump_hlo_as_text --xla_dump_hlo_as_dot"
# `module_0007.a_inference_flat_42__.5.cpu_after_optimizations.txt`
# `module_0007.a_inference_flat_42__.5.0012.simplification.after_algsimp.before_dce.txt`
_DUMPED = re.compile(
    r"module_(?P<number>\d+)\..+?\.(?:(?:cpu_)?(?P<what>(?:before|after)_optimizations.*)|(?P<pass>\d{4}\..+))"
)
PASSES = "passes"


@contextlib.contextmanager
def dumping(folder: str, passes: bool = False) -> Iterator[dict[str, str]]:
    """Give the environment of a process in which XLA dumps its modules; into a folder, unless that is "".

    There are ``before_optimizations`` and ``after_optimizations``, each ``.txt`` and ``.dot``, and what else XLA writes
    of each, with a number in front where a process compiled several modules; with ``passes`` the module after each pass
    as well, in a folder of that name.
    """
    if not folder:
        yield {}
        return
    with temporary_folder("hil-hlo-") as scratch:
        flags = f"--xla_dump_to={scratch} {_FLAGS}{' --xla_dump_hlo_pass_re=.*' if passes else ''}"
        yield {"XLA_FLAGS": " ".join(filter(None, (os.environ.get("XLA_FLAGS"), flags)))}
        written = sorted(path.name for path in Path(scratch).iterdir())
        found = [match for name in written if (match := _DUMPED.fullmatch(name))]
        several = len({match["number"] for match in found}) > 1
        for match in found:
            name = match["what"] or match["pass"]
            place = Path(folder) if match["what"] else Path(folder, PASSES)
            place.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(scratch, match[0]), place / (f"{match['number']}.{name}" if several else name))


def write_hlo(path: str, function: str, dims: Mapping[str, int], folder: str, log: str, passes: bool = False) -> None:
    """Write what XLA makes of a model's function, for this machine, below a folder; the log says where it cannot."""
    command = module_command("hil.controller.models.tensorflow.hlo", path, function, json.dumps(dict(dims)))
    with dumping(str(Path(folder, HLO)), passes) as flags:
        code, _ = run_logged(command, Path(log), environment=flags)
    if code:
        print(f"XLA ended {death_text(code)}: its modules in {folder} are not complete", flush=True)


def main() -> None:
    """Compile a function of a model, which XLA dumps."""
    import tensorflow as tf

    from hil.controller.models.tensorflow.source import named_outputs, open_model

    path, function, dims = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    source = open_model(path, function, dims)

    def flat(*tensors: object) -> list[object]:
        return [tf.identity(leaf) for _, leaf in named_outputs(source.call(list(tensors)))]

    compiled = tf.function(flat, jit_compile=True, autograph=False)
    compiled.experimental_get_compiler_ir(*source.sized())(stage="optimized_hlo")


if __name__ == "__main__":
    main()
