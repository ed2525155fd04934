"""Call a module's methods on one backend directly, without a trace."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.pipeline.settings.options import make_case_settings
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.core.scratch import make_temporary_folder
from hil.errors import UsageError, did_you_mean
from hil.testing.traces.backends import parse_targets
from hil.testing.traces.folders import claim_folder, identify_owner
from hil.testing.traces.session import make_subject
from hil.testing.traces.traced import set_random_seed

if TYPE_CHECKING:
    from typing_extensions import Self

# Backends that IREE removed -> their replacements.
_REPLACED = {"iree_vmla": "iree_vmvx", "iree_llvmjit": "iree_llvmcpu", "iree_llvmaot": "iree_llvmcpu"}


class CompiledModule:
    """A module's methods on one backend. Variables keep their values between calls. Context manager.

    ``module.predict(x)`` calls a method; ``module(x)`` calls the only method. Arguments and results have the form of a
    trace: positional arguments, and NumPy arrays in the method's nesting. Each program is compiled on first use.
    """

    def __init__(self, runner: Any, methods: Callable[[], tuple[str, ...]], name: str, seed: int) -> None:
        self._runner = runner
        self._methods = methods
        self._name = name
        self._seed = seed
        self._closing = ExitStack()

    def reinitialize(self) -> None:
        """Create a new module with seeded random numbers. Its variables have the initial values."""
        set_random_seed(self._seed)
        self._runner.begin()
        set_random_seed(self._seed)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        methods = self._methods()
        if name not in methods:
            what = f"method {name!r} not found in {self._name}"
            raise AttributeError(f"{what}: {did_you_mean(name, methods)}exported methods: {', '.join(methods)}")
        return functools.partial(self._call_method, name)

    def __call__(self, *args: Any) -> Any:
        """Call the only method. Raises UsageError if there are multiple."""
        methods = self._methods()
        if len(methods) > 1:
            raise UsageError(
                f"cannot call {self._name}: it has {len(methods)} methods", hint=f"call a method: .{methods[0]}(...)"
            )
        return self._call_method(methods[0], *args)

    def _call_method(self, method: str, /, *args: Any) -> Any:
        return self._runner.call(method, self._runner.inputs(method, args)).outputs

    def close(self) -> None:
        """Release the board and end processes."""
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
        module: A tf.Module or Keras model class, a callable that returns a module, or a class with
            :class:`hil.testing.ModelFile` attributes. Also a module instance: calls then change its variables.
        backend: ``tf``, ``iree_llvmcpu``, ``tflite``, ``board:NAME``, ...
        exported_names: Methods to export; None is every public tf.function.
        artifacts_dir: Directory for programs and MLIR; None stores nothing.
        name: The module's name: see :class:`ModuleTraces`.
        settings: Settings to compile and run programs, as in :func:`hil.run`: ``timeout``, ``no_fallback``, ...

    Raises:
        UsageError: unknown backend, the backend does not support such modules, or a method does not exist.
        NotRun: the backend is not available.
        BoardError: the board is not available.
    """
    chosen = make_case_settings(settings)
    is_factory = inspect.isclass(module) or inspect.isroutine(module) or isinstance(module, functools.partial)
    maker = module if is_factory else (lambda: module)
    if not is_factory:
        name = name or type(module).__name__
    subject = make_subject(maker, exported_names, name)
    target, *others = parse_targets(backend, subject.references)
    if others:
        raise UsageError(f"expected a single backend, got {backend!r}", hint="compile for each backend separately")
    with ExitStack() as stack:
        if artifacts_dir is None:
            folder = Path(stack.enter_context(make_temporary_folder("hil-compiled-"))) / "module"
        else:
            folder = claim_folder(
                Path(artifacts_dir).absolute(), subject.name, identify_owner(module, Path(artifacts_dir))
            )
        isolated = stack.enter_context(Isolated())
        runner = subject.make_runner(target, RunContext(Cache(), isolated), folder, chosen)
        stack.callback(runner.close)
        compiled = CompiledModule(runner, lambda: subject.methods, subject.name, chosen.seed)
        compiled.reinitialize()
        compiled._closing = stack.pop_all()
        return compiled


# IREE's TensorFlow tests use this class and :func:`IreeCompiledModule`.
@dataclass(frozen=True)
class BackendInfo:
    """Backend of a module, by name: ``iree_llvmcpu``, ``tf``, ``board:NAME``, ... (see :func:`hil.traces.compile`)."""

    backend_name: str

    def compile(
        self, module: Any, exported_names: Sequence[str] = (), artifacts_dir: str | Path | None = None
    ) -> CompiledModule:
        """Return a module whose methods run on this backend.

        Args:
            module: see :func:`hil.traces.compile`, which also raises the errors.
            exported_names: methods to export; empty is every public tf.function.
            artifacts_dir: see :func:`hil.traces.compile`.
        """
        backend = _REPLACED.get(self.backend_name, self.backend_name)
        return compile(module, backend, exported_names=exported_names or None, artifacts_dir=artifacts_dir)


def IreeCompiledModule(  # noqa: N802 (IREE's name)
    module_class: Any,
    backend_info: BackendInfo,
    exported_names: Sequence[str] = (),
    artifacts_dir: str | Path | None = None,
) -> CompiledModule:
    """Return a module whose methods run on a backend, as :meth:`BackendInfo.compile` does."""
    return backend_info.compile(module_class, exported_names, artifacts_dir)
