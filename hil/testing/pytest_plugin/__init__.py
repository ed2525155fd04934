"""The pytest plugin: models in a folder become tests, and a user's own tests can ask for each stage of their way.

Loaded by every pytest that finds hil installed, so nothing heavy is imported here, and nothing happens where the ini
setting ``hil_models`` is not set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from hil.testing.pytest_plugin.options import CONFLICTS, MODELS, OPTIONS, add_options

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
    from hil.testing.pytest_plugin import fixtures

    config.pluginmanager.register(fixtures, "hil-fixtures")
    _let_prompts_through(config)
    if config.getini(MODELS) and not config.option.help:
        from hil.testing.pytest_plugin.hooks import begin

        begin(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A user's own test that asks for a fixture of ours."""
    if "hil_case" in metafunc.fixturenames:
        from hil.testing.pytest_plugin.collecting import multiply

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
