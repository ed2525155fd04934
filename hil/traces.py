"""Trace the calls of a module: compile it for a backend, and read and compare stored traces.

>>> import hil.traces
>>> with hil.traces.compile(MyModule, "iree_vmvx") as module:                      # doctest: +SKIP
...     module.predict(x)

To test backends against each other, use :mod:`hil.testing`. Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hil.controller.workloads.traces.comparing import CallComparison as CallComparison
    from hil.controller.workloads.traces.comparing import Judging as Judging
    from hil.controller.workloads.traces.comparing import compare_traces as compare_traces
    from hil.controller.workloads.traces.stored import TraceComparison as TraceComparison
    from hil.controller.workloads.traces.stored import compare_stored as compare_stored
    from hil.controller.workloads.traces.stored import find_traces as find_traces
    from hil.controller.workloads.traces.trace import ModuleCall as ModuleCall
    from hil.controller.workloads.traces.trace import Trace as Trace
    from hil.testing.traces.compiled import CompiledModule as CompiledModule
    from hil.testing.traces.compiled import compile as compile

_STORED = "hil.controller.workloads.traces"
_HOMES = {
    f"{_STORED}.comparing": ("CallComparison", "Judging", "compare_traces"),
    f"{_STORED}.stored": ("TraceComparison", "compare_stored", "find_traces"),
    f"{_STORED}.trace": ("ModuleCall", "Trace"),
    "hil.testing.traces.compiled": ("CompiledModule", "compile"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hil.traces' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
