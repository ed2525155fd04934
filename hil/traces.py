"""Traces under a name of their own: :mod:`hil.testing` has the same, and a module is compiled for one backend here.

>>> import hil.traces
>>> with hil.traces.compile(MyModule, "iree_vmvx") as module:                      # doctest: +SKIP
...     module.predict(x)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hil import testing

if TYPE_CHECKING:
    from hil.controller.workloads.traces.trace import ModuleCall as ModuleCall
    from hil.controller.workloads.traces.trace import Trace as Trace
    from hil.testing.traces.compiled import CompiledModule as CompiledModule
    from hil.testing.traces.compiled import compile as compile
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

_OWN = ("CompiledModule", "compile")
__all__ = sorted([*_OWN, *testing.__all__])


def __getattr__(name: str) -> Any:
    if name not in _OWN:
        return getattr(testing, name)
    from hil.testing.traces import compiled

    return getattr(compiled, name)
