"""A module on one backend, called directly: what a trace does with it, without the trace."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.pipeline.options import case_settings
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.core.scratch import temporary_folder
from hil.errors import UsageError, did_you_mean
from hil.testing.traces.backends import parse_targets
from hil.testing.traces.folders import claim, owner_of
from hil.testing.traces.session import subject_of
from hil.testing.traces.traced import set_random_seed

if TYPE_CHECKING:
    from typing_extensions import Self


class CompiledModule:
    """A module's methods on one backend; its variables keep what calls make of them. A context manager.

    ``module.predict(x)`` calls a method, ``module(x)`` the only one. What a call takes and returns is as in a trace:
    arguments by position, numpy arrays nested as the method nests them. A program is compiled when it is first needed.
    """

    def __init__(self, runner: Any, methods: Callable[[], tuple[str, ...]], name: str, seed: int) -> None:
        self._runner = runner
        self._methods = methods
        self._name = name
        self._seed = seed
        self._closing = ExitStack()

    def reinitialize(self) -> None:
        """Make the module anew, random numbers seeded before: its variables are what they were at first."""
        set_random_seed(self._seed)
        self._runner.begin()
        set_random_seed(self._seed)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        methods = self._methods()
        if name not in methods:
            what = f"{self._name} exports no {name!r}"
            raise AttributeError(f"{what}: {did_you_mean(name, methods)}it exports {', '.join(methods)}")
        return functools.partial(self._call, name)

    def __call__(self, *args: Any) -> Any:
        """Call the only method. Raises UsageError: there are several."""
        methods = self._methods()
        if len(methods) > 1:
            raise UsageError(f"{self._name} has {len(methods)} methods", hint=f"call one: .{methods[0]}(...)")
        return self._call(methods[0], *args)

    def _call(self, method: str, /, *args: Any) -> Any:
        return self._runner.call(method, self._runner.inputs(method, args)).outputs

    def close(self) -> None:
        """Give the board back, end processes."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def compile(
    module: Any,
    backend: str = "iree_llvmcpu",
    *,
    exported_names: Sequence[str] | None = None,
    artifacts_dir: str | Path | None = None,
    name: str = "",
    **settings: Any,
) -> CompiledModule:
    """Return a module whose methods run on a backend.

    Args:
        module: a tf.Module's or Keras model's class, or whatever makes one when called; or such a module itself, whose
            variables then change; or a class with :class:`hil.testing.ModelFile` attributes.
        backend: ``tf``, ``iree_llvmcpu``, ``tflite``, ``board:NAME``, ...
        exported_names: its methods; None is every public tf.function.
        artifacts_dir: where programs and their MLIR are kept; None keeps nothing.
        name: of the module, see :class:`ModuleTraces`.
        settings: how programs are compiled and run, as of :func:`hil.run`: ``timeout``, ``no_fallback``, ...

    Raises:
        UsageError: there is no such backend, it cannot run such modules, or the module has no such methods.
        NotRun: the backend is not here.
        BoardError: the board cannot be had.
    """
    chosen = case_settings(settings)
    is_factory = inspect.isclass(module) or inspect.isroutine(module) or isinstance(module, functools.partial)
    maker = module if is_factory else (lambda: module)
    if not is_factory:
        name = name or type(module).__name__
    subject = subject_of(maker, exported_names, name)
    target, *others = parse_targets(backend, subject.references)
    if others:
        raise UsageError(f"{backend} are several backends", hint="compile for each")
    with ExitStack() as stack:
        if artifacts_dir is None:
            folder = Path(stack.enter_context(temporary_folder("hil-compiled-"))) / "module"
        else:
            folder = claim(Path(artifacts_dir).absolute(), subject.name, owner_of(module, Path(artifacts_dir)))
        isolated = stack.enter_context(Isolated())
        runner = subject.runner(target, RunContext(Cache(), isolated), folder, chosen)
        stack.callback(runner.close)
        compiled = CompiledModule(runner, lambda: subject.methods, subject.name, chosen.seed)
        compiled.reinitialize()
        compiled._closing = stack.pop_all()
        return compiled
