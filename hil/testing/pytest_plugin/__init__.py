"""The pytest plugin: models in a folder become tests, and a user's own tests can ask for each stage of their way.

Loaded by every pytest that finds hil installed, so nothing heavy is imported here, and nothing happens where the ini
setting ``hil_models`` is not set.

There is a fixture for each stage of a case: what a user's own test asks for is made, and what it needs before that. A
stage that fails is the test's error; what a test does with a result that differs is its own affair. Any fixture can be
replaced in a conftest, and what comes after it takes what the replacement gives.
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
    "hil(models=PATTERN, layers=BOOL, ops=PATTERN): the cases that a test which asks for hil's fixtures is run with: "
    "those of models whose name matches, of layers only or of whole models only, of layers whose operator matches."
)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Options and ini settings."""
    add_options(parser, pluginmanager.get_plugin("pytestconfig"))


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Iterator[None]:
    """A conftest that wants a name of ours for its own option is told so, without a traceback."""
    try:
        return (yield)
    except CONFLICTS as error:
        if not early_config.getini(MODELS) or not any(
            option.known and option.known in str(error) for option in OPTIONS
        ):
            raise
        raise pytest.UsageError(f"{error}: hil takes it where the ini setting {MODELS} is set") from error


def pytest_configure(config: pytest.Config) -> None:
    """Where models are named, add what turns them into tests."""
    config.addinivalue_line("markers", MARKER)
    config.pluginmanager.register(BackendRows(config), "hil-backend-rows")
    _let_prompts_through(config)
    try:
        check_repeats(config)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    if config.getini(MODELS) and not config.option.help:
        from hil.testing.pytest_plugin.hooks import begin

        begin(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A user's own test that asks for a fixture of ours."""
    if "hil_case" in metafunc.fixturenames:
        from hil.testing.pytest_plugin.hooks import multiply

        multiply(metafunc)


def _let_prompts_through(config: pytest.Config) -> None:
    """A board may ask for a password: whoever runs pytest in a terminal sees that, captured output or not."""
    from hil.controller.storage import prompts

    if capture := config.pluginmanager.getplugin("capturemanager"):

        @contextlib.contextmanager
        def pause() -> Iterator[None]:
            capture.suspend(in_=True)
            try:
                yield
            finally:
                capture.resume()

        stack = contextlib.ExitStack()
        stack.enter_context(prompts.pausing(pause))
        config.add_cleanup(stack.close)


@pytest.fixture
def hil_case(request: pytest.FixtureRequest) -> HilCase:
    """The case: a model or one of its layers (``spec.model``, ``spec.layer``, ``spec.op``), and its ``target``."""
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
    """The model as it was read: its inputs and outputs, its digest."""
    return _hil_run.model()


@pytest.fixture
def hil_artifact(_hil_run: CaseRun, hil_model: Model, request: pytest.FixtureRequest) -> Artifact:
    """The program, compiled for the board."""
    if _hil_run.config is None:
        # Only the board knows what to compile for: it has to be the one that runs the program.
        request.getfixturevalue("hil_board")
    return _hil_run.compile()


@pytest.fixture
def hil_inputs(_hil_run: CaseRun, hil_model: Model) -> Mapping[str, Array]:
    """The inputs by name; nothing where only the board knows what the model takes."""
    return _hil_run.case.inputs or {}


@pytest.fixture
def hil_board(_hil_run: CaseRun) -> Iterator[Board]:
    """A board, the test's alone until it is over."""
    with _hil_run.borrow() as session:
        yield session.board


@pytest.fixture
def hil_result(_hil_run: CaseRun, hil_artifact: Artifact, hil_inputs: Mapping[str, Array]) -> RunResult:
    """What the board gave: outputs, times of its own clock, provenance."""
    return _hil_run.run(hil_artifact, hil_inputs)


@pytest.fixture
def hil_reference(_hil_run: CaseRun, hil_inputs: Mapping[str, Array]) -> RunResult:
    """What the CPU reference gave for the same inputs, or what the model's folder says is expected."""
    return _hil_run.run_reference(hil_inputs)


@pytest.fixture
def hil_verdict(_hil_run: CaseRun, hil_result: RunResult, hil_reference: RunResult) -> Verdict:
    """The result beside the reference: true where every output agrees, with the statistics of each."""
    return _hil_run.verdict(hil_result, hil_reference)


@pytest.fixture
def hil_compare(_hil_run: CaseRun, request: pytest.FixtureRequest) -> Callable[..., Verdict]:
    """A function that fails the test where two results differ, with a table of how.

    ``hil_compare()`` compares the result with the reference as the suite does, expected failures included;
    ``hil_compare(hil_result, other, rtol=1e-2)`` any two, in a tolerance of the test's own. Returns the verdict.
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
