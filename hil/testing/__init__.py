"""Compare traces of modules on multiple backends, and provide the pytest plugin.

Submodules are imported lazily, because pytest loads the plugin from this package in every environment with hil.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hil.controller.workloads.traces.trace import ModuleCall as ModuleCall
    from hil.controller.workloads.traces.trace import Trace as Trace
    from hil.testing.traces.compiled import BackendInfo as BackendInfo
    from hil.testing.traces.compiled import CompiledModule as CompiledModule
    from hil.testing.traces.compiled import IreeCompiledModule as IreeCompiledModule
    from hil.testing.traces.model_files import ModelFile as ModelFile
    from hil.testing.traces.session import ModuleTraces as ModuleTraces
    from hil.testing.traces.session import compare_backends as compare_backends
    from hil.testing.traces.testcase import TracedModuleTestCase as TracedModuleTestCase
    from hil.testing.traces.testcase import compile_module as compile_module
    from hil.testing.traces.testcase import main as main
    from hil.testing.traces.traced import TracedModule as TracedModule
    from hil.testing.traces.traced import ndarange as ndarange
    from hil.testing.traces.traced import set_random_seed as set_random_seed
    from hil.testing.traces.traced import uniform as uniform

_TRACES = "hil.testing.traces"
_HOMES = {
    f"{_TRACES}.compiled": ("BackendInfo", "CompiledModule", "IreeCompiledModule"),
    f"{_TRACES}.model_files": ("ModelFile",),
    f"{_TRACES}.session": ("ModuleTraces", "compare_backends"),
    f"{_TRACES}.testcase": ("TracedModuleTestCase", "compile_module", "main"),
    f"{_TRACES}.traced": ("TracedModule", "ndarange", "set_random_seed", "uniform"),
    "hil.controller.workloads.traces.trace": ("ModuleCall", "Trace"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hil.testing' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
