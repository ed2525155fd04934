"""Test compiled ML models on hardware: compare outputs with a reference, measure speed, locate errors.

>>> import hil
>>> with hil.connect("sim") as board:                      # doctest: +SKIP
...     case = hil.run("model.onnx", board, {"x": x})
...     print(case.outcome, case.result.device_ns)
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

# `python -m hil...` puts the working directory first on the path. This directory is untrusted: a numpy.py there would
# replace numpy. So remove it. During the module search of `python -m`, sys.argv[0] is "-m". With -P (Python 3.11),
# Python does not add the directory, so nothing is removed: the working directory is then on the path only through
# PYTHONPATH.
if sys.argv[:1] == ["-m"] and not getattr(sys.flags, "safe_path", False):
    with contextlib.suppress(OSError):
        if sys.path[:1] == [os.getcwd()]:  # noqa: PTH109 (pathlib is not loaded for this)
            del sys.path[0]

# Since 1.29, onnxruntime's wheels send usage data to Microsoft after the import. Disable this here, because every
# process of hil imports this module first. A value that the user sets takes precedence.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from hil import traces as traces
    from hil.api import connect as connect
    from hil.api import run as run
    from hil.controller.models.tensorflow.lower import lower_function as lower_function
    from hil.controller.models.torch_module import export_module as export_module
    from hil.controller.storage.run_context import open_context as open_context
    from hil.controller.workloads.loaded_run import load_run as load_run

__all__ = ["__version__", "connect", "export_module", "load_run", "lower_function", "open_context", "run", "traces"]
# Name -> module. Names are imported on first use, so `import hil` is fast and agents never load the controller.
_HOME = {
    "connect": "hil.api",
    "run": "hil.api",
    "load_run": "hil.controller.workloads.loaded_run",
    "export_module": "hil.controller.models.torch_module",
    "lower_function": "hil.controller.models.tensorflow.lower",
    "open_context": "hil.controller.storage.run_context",
}


def __getattr__(name: str) -> Any:
    if name == "traces" or name in _HOME:
        from importlib import import_module

        return import_module("hil.traces") if name == "traces" else getattr(import_module(_HOME[name]), name)
    if name == "__version__":
        from hil.core import own_version

        return own_version()
    raise AttributeError(f"module 'hil' has no attribute {name!r}")
