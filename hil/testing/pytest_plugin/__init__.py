"""The pytest plugin: models in a directory become tests, and user tests can use fixtures for every stage of a case.

Every pytest run in an environment with hil loads this module, so it imports nothing heavy. The plugin is inactive
unless the ini setting ``hil_models`` is set.

Each fixture runs the stage of the same name, and first all earlier stages. If a stage fails, the test has an error. The
test decides how to handle a mismatch. A conftest can replace any fixture. Later stages then use the value of the
replacement.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import pytest

from hil.errors import UsageError
from hil.testing.pytest_plugin.backend_rows import BackendRows
from hil.testing.pytest_plugin.options import CONFLICTS, MODELS, OPTIONS, add_options, check_repeats

if TYPE_CHECKING:
    from hil.compare.verdict import Verdict
    from hil.controller.devices.board import Board
    from hil.core.results import Artifact, Model, RunResult
    from hil.core.tensors import Array
    from hil.testing.pytest_plugin.running import CaseRun
    from hil.testing.pytest_plugin.session import HilCase


MARKER = (
    "hil(models=PATTERN, layers=BOOL, ops=PATTERN): select the cases of a test with hil's fixtures: by name of the "
    "model, layers only or whole models only, by operator of the layer."
)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add options and ini settings."""
    add_options(parser, pluginmanager.get_plugin("pytestconfig"))


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Iterator[None]:
    """Report an option conflict between hil and a conftest without a traceback."""
    try:
        return (yield)
    except CONFLICTS as error:
        if not early_config.getini(MODELS) or not any(
            option.known and option.known in str(error) for option in OPTIONS
        ):
            raise
        raise pytest.UsageError(
            f"{error}: hil adds this option too, because the ini setting {MODELS} is set"
        ) from error


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and, if ``hil_models`` is set, the hooks that turn models into tests."""
    config.addinivalue_line("markers", MARKER)
    config.pluginmanager.register(BackendRows(config), "hil-backend-rows")
    _show_prompts(config)
    try:
        check_repeats(config)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    if config.getini(MODELS) and not config.option.help:
        from hil.testing.pytest_plugin.hooks import begin

        begin(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a user test that uses a fixture of hil."""
    if "hil_case" in metafunc.fixturenames:
        from hil.testing.pytest_plugin.hooks import multiply

        multiply(metafunc)


def _show_prompts(config: pytest.Config) -> None:
    """Show password prompts of boards in the terminal even if pytest captures output."""
    from hil.controller.storage.screen import prompts

    if capture := config.pluginmanager.getplugin("capturemanager"):

        @contextlib.contextmanager
        def pause() -> Iterator[None]:
            capture.suspend(in_=True)
            try:
                yield
            finally:
                capture.resume()

        stack = contextlib.ExitStack()
        stack.enter_context(prompts.pause_during_prompts(pause))
        config.add_cleanup(stack.close)


@pytest.fixture
def hil_case(request: pytest.FixtureRequest) -> HilCase:
    """The case: a model or a layer (``spec.model``, ``spec.layer``, ``spec.op``), and the ``target``."""
    case: HilCase = request.param if hasattr(request, "param") else request.node.case
    return case


@pytest.fixture
def _hil_run(hil_case: HilCase, request: pytest.FixtureRequest) -> Iterator[CaseRun]:
    from hil.testing.pytest_plugin.running import RUN, CaseRun
    from hil.testing.pytest_plugin.session import SESSION

    run = request.node.stash[RUN] = CaseRun(request.config.stash[SESSION], hil_case, request.node)
    yield run
    run.end()


@pytest.fixture
def hil_model(_hil_run: CaseRun) -> Model:
    """The imported model: its inputs, outputs and digest."""
    return _hil_run.get_model()


@pytest.fixture
def hil_artifact(_hil_run: CaseRun, hil_model: Model, request: pytest.FixtureRequest) -> Artifact:
    """The program, compiled for the board."""
    if _hil_run.config is None:
        # Only the board knows the compile target, so compile for the board that will run the program.
        request.getfixturevalue("hil_board")
    return _hil_run.compile()


@pytest.fixture
def hil_inputs(_hil_run: CaseRun, hil_model: Model) -> Mapping[str, Array]:
    """The inputs by name; empty if only the board knows the model's inputs."""
    return _hil_run.case.inputs or {}


@pytest.fixture
def hil_board(_hil_run: CaseRun) -> Iterator[Board]:
    """A board for exclusive use until the test ends."""
    with _hil_run.borrow_board() as session:
        yield session.board


@pytest.fixture
def hil_result(_hil_run: CaseRun, hil_artifact: Artifact, hil_inputs: Mapping[str, Array]) -> RunResult:
    """The board's result: outputs, times on the board's clock, provenance."""
    return _hil_run.run(hil_artifact, hil_inputs)


@pytest.fixture
def hil_reference(_hil_run: CaseRun, hil_inputs: Mapping[str, Array]) -> RunResult:
    """The CPU reference's result for the same inputs, or the expected outputs in the model's directory."""
    return _hil_run.run_reference(hil_inputs)


@pytest.fixture
def hil_verdict(_hil_run: CaseRun, hil_result: RunResult, hil_reference: RunResult) -> Verdict:
    """The verdict on the result compared with the reference, with statistics of each output.

    True if all outputs match.
    """
    return _hil_run.compare_outputs(hil_result, hil_reference)


@pytest.fixture
def hil_compare(_hil_run: CaseRun, request: pytest.FixtureRequest) -> Callable[..., Verdict]:
    """A function that compares two results. If they differ, the test fails with a table of the outputs.

    ``hil_compare()`` compares the result with the reference like the suite, including expected failures.
    ``hil_compare(hil_result, other, rtol=1e-2)`` compares any two results with a given tolerance. Returns the verdict.
    """

    def compare(
        actual: RunResult | None = None,
        reference: RunResult | None = None,
        *,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> Verdict:
        ours: RunResult = actual if actual is not None else request.getfixturevalue("hil_result")
        theirs: RunResult = reference if reference is not None else request.getfixturevalue("hil_reference")
        if all(given is None for given in (actual, reference, rtol, atol)):
            return _hil_run.check(ours, theirs)
        return _hil_run.check_these(ours, theirs, rtol=rtol, atol=atol)

    return compare
