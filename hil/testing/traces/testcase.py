"""Test cases with traces, for unittest and pytest."""

from __future__ import annotations

import argparse
import inspect
import shlex
import sys
import unittest
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hil.controller.pipeline.settings.options import CaseSettings, flag_of, list_specs, make_case_settings
from hil.core.results import Outcome
from hil.errors import UsageError
from hil.testing.traces.backends import PYTEST_DEST, TEXTS, TraceOptions, check_backends, count_option, refuse_second
from hil.testing.traces.session import ModuleTraces, make_script_command, summarize_results
from hil.testing.traces.traced import TraceFunction

Case = TypeVar("Case", bound="type[TracedModuleTestCase]")
EXPECTED = "expected.toml"
# Case settings that do not apply to traces: the trace function defines the calls and inputs, and the reference is a
# backend.
_NOT_OF_TRACES = ("iterations", "warmup", "references", "require_independent", "input_range")
# Options of a test file run as a script.
_typed = TraceOptions()


def compile_module(
    module_class: Callable[[], Any],
    exported_names: Sequence[str] | None = None,
    *,
    target_backends: str = "",
    reference_backend: str = "",
    name: str = "",
) -> Callable[[Case], Case]:
    """Set the module of a :class:`TracedModuleTestCase`. hil compiles the module when a test first needs it.

    Args:
        module_class: A tf.Module or Keras model class (or a callable that returns a module), or a class with
            :class:`hil.testing.ModelFile` attributes.
        exported_names: Methods to export; None is every public tf.function. Omit methods that a backend cannot compile.
        target_backends: Default backends to test, if no option specifies others.
        reference_backend: Default reference, if no option specifies another.
        name: The module's name, instead of the class name; ``ResNet50/cifar10`` creates a subdirectory.
    """

    def set_module(case: Case) -> Case:
        case.module_class = staticmethod(module_class)
        case.exported_names = exported_names
        case.module_name = name
        case.own_options = TraceOptions(target_backends, reference_backend)
        return case

    return set_module


class TracedModuleTestCase(unittest.TestCase):
    """Base class for tests that trace a module. A test calls :meth:`compare_backends` with a trace function.

    The pytest options ``--target_backends``, ``--reference_backend`` and ``--artifacts_dir`` select backends and
    directory. A test file that ends with ``hil.testing.main()`` accepts these options too. Expected failures are listed
    in ``expected.toml`` in the test file's directory. Expected failures are xfail under pytest, and skipped under
    unittest. An unavailable backend is skipped without affecting other backends.
    """

    # module_class, exported_names, module_name, own_options: set by :func:`compile_module`.
    module_class: ClassVar[Callable[[], Any] | None] = None
    exported_names: ClassVar[Sequence[str] | None] = None
    module_name: ClassVar[str] = ""
    own_options: ClassVar[TraceOptions] = TraceOptions()
    _traces: ClassVar[ModuleTraces | None] = None
    _item: Any = None

    def run(self, result: Any = None) -> Any:
        """Run the test. Under pytest, ``result`` is the test item, which provides the options."""
        self._item = result if hasattr(result, "config") else None
        return super().run(result)

    def compare_backends(self, trace_function: TraceFunction) -> None:
        """Call a function with a :class:`TracedModule` for each backend, store the traces, and compare them.

        Raises:
            AssertionError: a backend failed or unexpectedly passed. The message describes all backends.
        """
        __tracebackhide__ = True  # the message is sufficient
        traces = self._open_traces()
        results = traces.compare(trace_function, self._build_command())
        text = summarize_results(results, traces.reference.name)
        if self._item is not None:
            from hil.testing.pytest_plugin.backend_rows import add_rows

            add_rows(self._item, results)
        if any(result.outcome.exit_code for result in results):
            raise self.failureException(text)
        if any(result.outcome is Outcome.XFAIL for result in results):
            # Report the expected failure at the end of the test, so that later comparisons still run.
            self.addCleanup(self._report_expected_failure, text)
        missing = [result for result in results if result.outcome is Outcome.SKIP]
        if len(missing) == len(results):
            self.skipTest("; ".join(result.record.message for result in missing))
        for result in missing if self._item is None else ():
            with self.subTest(backend=result.record.flow):
                self.skipTest(result.record.message)

    def _build_command(self) -> str:
        """Return the command that repeats this test."""
        if self._item is None:
            return make_script_command(type(self).__module__) or shlex.join(["python", "-m", "unittest", self.id()])
        from hil.testing.pytest_plugin.options import repeat_command

        words = repeat_command(self._item.config, self._item.nodeid)
        return shlex.join(
            [*words, *(f"--{name}={value}" for name, value in self._get_trace_options().items() if value)]
        )

    def _get_trace_options(self) -> dict[str, Any]:
        """Return the trace options given to pytest."""
        return {name: self._item.config.getoption(PYTEST_DEST.format(name), None) for name in TEXTS}

    def _report_expected_failure(self, text: str) -> None:
        if self._item is not None:
            import pytest

            pytest.xfail(text)
        self.skipTest(f"XFAIL: {text}")

    def _open_traces(self) -> ModuleTraces:
        """Return the class's traces, created at the first call."""
        case = type(self)
        if "_traces" not in vars(case) or case._traces is None:
            if case.module_class is None:
                raise UsageError(
                    f"missing module for {case.__name__}",
                    hint="decorate the class with @hil.testing.compile_module(ModuleClass)",
                )
            options, expected = self._build_options(), Path(inspect.getfile(case)).with_name(EXPECTED)
            case._traces = ModuleTraces(
                case.module_class,
                case.exported_names,
                options=options,
                expected=expected,
                name=case.module_name,
                owner=case,
            )
        assert case._traces is not None
        return case._traces

    def _build_options(self) -> TraceOptions:
        """Return the options of the command line, with defaults from the class."""
        typed = _typed
        if self._item is not None:
            from hil.testing.pytest_plugin.options import read_settings

            config = self._item.config
            of_cases = {name: one for name, one in read_settings(config).items() if name not in _NOT_OF_TRACES}
            typed = TraceOptions.of(**self._get_trace_options(), settings=CaseSettings(**of_cases))
            typed = replace(typed, artifacts_dir=config.invocation_params.dir / typed.artifacts_dir)
        return replace(
            typed,
            target_backends=typed.target_backends or self.own_options.target_backends,
            reference_backend=typed.reference_backend or self.own_options.reference_backend,
        )

    @classmethod
    def tearDownClass(cls) -> None:
        """Release the boards."""
        super().tearDownClass()
        if (traces := vars(cls).get("_traces")) is not None:
            traces.close()
            cls._traces = None


def main(argv: Sequence[str] | None = None, **settings: Any) -> None:
    """Run the tests of a test file: ``python test_file.py --target_backends=iree_llvmcpu,tflite``.

    Args:
        argv: Arguments; None is the command line. Other arguments are passed to unittest: test names, ``-v``,
            ``-k PATTERN``.
        settings: Keyword arguments for ``unittest.main``.
    """
    global _typed
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    for name, text in TEXTS.items():
        parser.add_argument(f"--{name}", help=text, type=str if name == "artifacts_dir" else check_backends)
    specs = {name: spec for name, spec in list_specs(CaseSettings).items() if name not in _NOT_OF_TRACES}
    single = [f"--{name}" for name in TEXTS]
    for name, spec in specs.items():
        default = getattr(CaseSettings(), name)
        how: dict[str, Any] = {"action": "store_true"} if isinstance(default, bool) else {"metavar": spec.metavar}
        if spec.repeats:
            how |= {"action": "append", "default": []}
        elif not isinstance(default, bool):
            number = float if default is None else type(default)
            how |= {"default": default, "type": Path if spec.metavar == "DIR" else number}
            single.append(flag_of(name, spec))
        parser.add_argument(flag_of(name, spec), dest=name, help=spec.help, **how)
    options, rest = parser.parse_known_args(words)
    if {"-h", "--help"} & set(rest):
        parser.print_help()
    try:
        for flag in single:
            refuse_second(flag, count_option(words, flag))
        given = {name: getattr(options, name) for name in specs}
        chosen = make_case_settings({name: tuple(one) if isinstance(one, list) else one for name, one in given.items()})
    except UsageError as error:
        parser.error(error.message)
    _typed = TraceOptions.of(**{name: getattr(options, name) for name in TEXTS}, settings=chosen)
    unittest.main(argv=[sys.argv[0], *rest], **settings)
