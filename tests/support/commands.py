"""The command `hil` as a user runs it, and models for tests. A pytest plugin for all tests."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

from hil.controller.storage.cache import choose_default_root
from hil.errors import EXIT_INTERNAL
from support.agents import start_process, stop_process
from support.command_server import CommandServer
from support.kept import keeping_simulators
from support.models import save_model

_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Ended:
    """Result of a command."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.out)

    @property
    def case(self) -> dict[str, Any]:
        (case,) = self.document["cases"]
        return case


def with_tools(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that imports `tools`, as the scripts set it."""
    return {**environment, "PYTHONPATH": str(Path(__file__).parents[2])}


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON documents of a file that another process extends, or an empty list if the file does not exist
    yet.
    """
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache for all workers of this session. Packages for boards and compiled libraries remain after the session."""
    folder = tmp_path_factory.getbasetemp()
    cache = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "shared-cache"
    cache.mkdir(exist_ok=True)
    for name in ("board-wheels", "tfcompile-runtime", "zig"):
        lasting = choose_default_root() / name
        lasting.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (cache / name).symlink_to(lasting)
    return cache


@pytest.fixture
def environment(shared_cache: Path, tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "HIL_CACHE_DIR": str(shared_cache), "HOME": str(tmp_path), "XDG_CONFIG_HOME": ""}


@pytest.fixture(scope="session")
def simulators_folder() -> Iterator[str]:
    """Directory of simulators that commands of several tests share. A start takes longer than a small run."""
    environment = dict(os.environ)
    with keeping_simulators(environment):
        yield environment["TMPDIR"]


@pytest.fixture
def sharing_environment(environment: dict[str, str], simulators_folder: str) -> dict[str, str]:
    """Return an environment whose commands share simulators with other tests."""
    shared = {**environment, "TMPDIR": simulators_folder}
    del shared["HIL_SIMULATOR"]
    return shared


@functools.cache
def _start_command_server() -> tuple[CommandServer, tempfile.TemporaryDirectory[str]]:
    folder = tempfile.TemporaryDirectory(prefix="commands-")
    return CommandServer(Path(folder.name)), folder


def pytest_unconfigure() -> None:
    """Stop the command server, if a test started it."""
    if _start_command_server.cache_info().currsize:
        server, folder = _start_command_server()
        server.close()
        folder.cleanup()


@pytest.fixture
def hil(tmp_path: Path, environment: dict[str, str], sharing_environment: dict[str, str]) -> Callable[..., Ended]:
    """Return a function that runs `hil ARGS...` in an empty directory."""
    unchanged = dict(environment)

    def call(*args: object, cwd: Path = tmp_path) -> Ended:
        words = [*map(str, args)]
        # Every additional environment or board config would leave an idle simulator.
        shares = environment == unchanged and "--board" not in words
        return run_hil(words, sharing_environment if shares else environment, cwd)

    return call


def run_hil(words: Sequence[str], environment: Mapping[str, str], cwd: Path, timeout: float = _TIMEOUT_S) -> Ended:
    """Run `hil WORDS...`, as a child of a server if the child has the effects of the environment."""
    server, _ = _start_command_server()
    if server.can_run(environment):
        done = server.run(["hil", *words], env=environment, cwd=cwd, timeout=timeout)
        assert done.code is not None, f"hil {shlex.join(words)} took more than {timeout:g} s: {done.err}"
        ended = Ended(done.code, done.out, done.err)
    else:
        command = [sys.executable, "-m", "hil.controller.cli.main", *words]
        made = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
        ended = Ended(made.returncode, made.stdout, made.stderr)
    assert ended.code != EXIT_INTERNAL and "Traceback" not in ended.err, ended.err
    return ended


@pytest.fixture(scope="session")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Simulator that many tests use, one after another."""
    folder = tmp_path_factory.mktemp("sim")
    process, address = start_process("hil.sim", f"unix:{folder}/sim.sock", folder / "store")
    yield address
    stop_process(process)


@pytest.fixture
def doubling(tmp_path: Path) -> Path:
    """Save a model that computes y = x + x, with 4 float32 values."""
    node = helper.make_node("Add", ["x", "x"], ["y"], "twice")
    value = (TensorProto.FLOAT, [4])
    return save_model(tmp_path / "doubling.onnx", [node], [("x", *value)], [("y", *value)])
