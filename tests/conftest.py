"""What every test shares: the markers that the folders give, and hypothesis without its stopwatch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from support.waiting import allowed_s

pytest_plugins = [
    f"support.{name}" for name in ("agents", "boards", "commands", "fake_farm", "farms", "labgrids", "microcontrollers")
]

# Many images of containers set it. The tests start some thousand processes: two thirds of what `hil run` costs would
# then be compiling the same modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# As `hil` does for what it starts: threads that have nothing to do leave their core to other tests.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

# Half a second each: the tests of the pictures ask for them.
os.environ["HIL_PICTURES"] = "0"

# What tests start ends with them.
os.environ["HIL_SIMULATOR"] = "fresh"

# How long one example takes says nothing on a machine that runs other tests beside it.
# scripts/test --all tries each property more often, and scripts/fuzz for as long as it is given.
settings.register_profile("hil", deadline=None, max_examples=40)
settings.register_profile("thorough", deadline=None, max_examples=200)
settings.load_profile("hil")

INTEGRATION = Path(__file__).parent / "integration"
FRAMEWORKS = Path(__file__).parent / "frameworks"
# A test without a limit of its own. pytest-timeout then shows the stacks of all threads. Not in the ini: without the
# plugin, which the examples do not need, pytest refuses an ini that sets it.
TIMEOUT_S = 120.0
# Files of tests of which some take half a minute and more, and tests that compile with a framework.
LONG = ("test_docs.py", "test_mutations.py", "test_lying_agent.py")
LONG_TIMEOUT_S = 900.0


def pytest_configure(config: pytest.Config) -> None:
    # pytest takes the asserts of a plugin's whole distribution for those of tests, and parses each module of hil when
    # some thread imports it. Python 3.11 before 3.11.8 fails where two threads do so at once (SystemError, gh-106905).
    hook: Any = config.pluginmanager.rewrite_hook
    if hasattr(hook, "_must_rewrite"):  # not with --assert=plain
        hook._must_rewrite.discard("hil")
        hook._marked_for_rewrite_cache.clear()
    # Whoever names a path wants all that is there. A worker of xdist is given the same arguments.
    if config.args_source is pytest.Config.ArgsSource.ARGS and "daily" in config.option.markexpr:
        config.option.markexpr = ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip integration modules without a daily test if only daily tests run: importing all modules takes seconds."""
    if "daily" not in config.option.markexpr or not collection_path.is_relative_to(INTEGRATION):
        return None
    is_other = collection_path.name.startswith("test_") and "daily" not in collection_path.read_text()
    return True if is_other else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(INTEGRATION):
            item.add_marker("ci")
        if config.pluginmanager.hasplugin("timeout") and item.get_closest_marker("timeout") is None:
            is_long = item.path.name in LONG or item.path.is_relative_to(FRAMEWORKS)
            item.add_marker(pytest.mark.timeout(allowed_s(LONG_TIMEOUT_S if is_long else TIMEOUT_S)))
    items[:] = _long_first(items)


def _long_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """The items for several workers, each of which begins with some of those that take longest.

    xdist gives each worker an equal piece of the list; what takes a minute is not to begin when all else is done.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.path.name in LONG]
    rest = [item for item in items if item.path.name not in LONG]
    if workers == 1 or not long:
        return items
    size = -(-len(rest) // workers)
    return [item for n in range(workers) for item in (*long[n::workers], *rest[n * size : (n + 1) * size])]
