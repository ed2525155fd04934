"""``python -m hil.controller.backends.compilers.tfcompile_command FOLDER TRIPLE CPU``: the tfcompile of TensorFlow's
wheel.

A process of its own each time: XLA reads its flags once in the life of a process, and a crash should be seen as one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from hil.controller.backends.compilers.tfcompile_graph import CONFIG, GRAPH
from hil.controller.storage.packages import package_folder

HEADER = "program.h"
CLASS = "hil::Program"
OBJECTS = ("function.o", "constants.o")
ERROR = "error.txt"
_MODULE = "_pywrap_tfcompile"
# As TensorFlow's own saved_model_cli has them: code for one thread, and none that calls a library that is not there.
_XLA_FLAGS = "--xla_cpu_multi_thread_eigen=false --xla_cpu_experimental_ynn_fusion_type="


def main() -> None:
    """Compile the graph in a folder; what goes wrong is written beside it."""
    folder, triple, cpu = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ["XLA_FLAGS"] = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), _XLA_FLAGS)))
    function, constants = (str(folder / name) for name in OBJECTS)
    try:
        _tfcompile().Compile(
            graph=str(folder / GRAPH),
            config=str(folder / CONFIG),
            cpp_class=CLASS,
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
    except Exception as error:  # TensorFlow has many
        (folder / ERROR).write_text(str(error))
        sys.exit(1)


def _tfcompile() -> Any:
    """The wheel's module alone: TensorFlow itself takes seconds to import, and is not needed."""
    spec = importlib.util.spec_from_file_location(_MODULE, package_folder("tensorflow") / "python" / f"{_MODULE}.so")
    if spec is None or spec.loader is None:
        raise ImportError(f"this TensorFlow has no {_MODULE}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
