"""Host of boards: a worker process per board, an agent process per simulated board, and the uplink process."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from hil.controller.farm.host.gateway_link import uplink
from hil.controller.farm.host.inventory import (
    BoardEntry,
    HostInfo,
    check_name,
    find_boards,
    make_simulators,
    make_socket_folder,
)
from hil.controller.farm.local.processes import ForkedProcess, PreforkSupervisor, end_with_parent, make_module_main
from hil.controller.farm.messages import JobResult, Kind
from hil.controller.farm.paths import FarmAddress
from hil.core.files import read_text
from hil.errors import FarmError, StorageError, UsageError
from hil.protocol.listening import take_descriptors

if TYPE_CHECKING:
    from hil.controller.farm.host.lease_runner import Attempt

# Modules of workers and simulators, imported once before the fork.
_WORKER = "hil.controller.farm.host.worker"
_SIMULATOR = "hil.sim.__main__"
_PRELOADED = (
    _WORKER,
    "hil.controller.farm.host.jobs.command_job",
    "hil.controller.farm.host.jobs.job_attempt",
    "hil.controller.workloads.board_checks",
    "hil.controller.workloads.run_job",
    "hil.controller.devices.links.agent",
    "hil.controller.devices.ssh.openssh.client",
    "hil.controller.backends.compilers.executorch",
    "hil.controller.backends.compilers.tensorflow.tfcompile",
    "hil.controller.backends.references.runners.onnx",
    "hil.controller.backends.references.runners.iree_llvm_cpu",
    "hil.controller.workloads.bundles.run",
    "hil.controller.workloads.suites.job",
    "grpc._channel",
    "ml_dtypes",
    "numpy.random",
)
# Limit numpy to one thread, because threads do not survive a fork.
_THREADS = "OPENBLAS_NUM_THREADS"
# Wait this long for the lock in seconds, because children of a killed host may take a moment to end.
_LOCK_SECONDS = 15.0
# Maximum restart delay of the uplink in seconds. The delay is so short that no lease expires in the meantime.
_UPLINK_PAUSE_SECONDS = 1.0
_SHOWN = 8


def serve(
    farm: FarmAddress,
    home: Path,
    *,
    name: str = "",
    site: str = "",
    boards: Sequence[str] = (),
    simulators: int = 0,
    faults: Sequence[str] = (),
    allow_commands: bool = False,
    say: Callable[[str], None],
) -> None:
    """Serve boards to a farm until SIGTERM or Ctrl-C.

    Args:
        home: the farm's directory on this machine; the host's directory is below it.
        name: name of the host, unique in the farm. "" uses the machine's name with a unique suffix.
        allow_commands: run commands of users with the right on this machine.
        boards: names or config files. Empty: all configured boards with an address, unless simulators are requested.

    Raises:
        UsageError: there is nothing to serve.
        FarmError: a host of this name is already running on this machine.
        StorageError: the host's directory cannot be written.
    """
    name = check_name(name) if name else _make_host_name(home)
    folder = home / "hosts" / name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / "files").mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror}") from error
    with _lock_folder(folder, name), contextlib.ExitStack() as afterwards:
        place = HostInfo(name, site, farm, folder, make_socket_folder(folder), allow_commands=allow_commands)
        afterwards.callback(shutil.rmtree, place.sockets, ignore_errors=True)
        posts = make_simulators(place, simulators, faults) if simulators else []
        if boards or not simulators:
            posts += find_boards(place, boards, faults)
        if not posts:
            raise UsageError(
                "no boards found on this host",
                hint="use --board NAME|FILE or --sim N, or add configs with an address to board_configs",
            )
        place = replace(place, boards=len(posts))
        for post in posts:
            post.folder.mkdir(parents=True, exist_ok=True)
        _preload_modules(any(post.simulator for post in posts))
        say(f"host {name}: {len(posts)} board{'s' * (len(posts) > 1)}: {_format_names(posts)}")
        listening = afterwards.enter_context(uplink.listen(place.uplink))
        children = [_make_uplink(place, listening), *(child for post in posts for child in _make_children(post, place))]
        PreforkSupervisor(children, say).run()


def _make_children(post: BoardEntry, site: HostInfo) -> list[ForkedProcess]:
    return [_make_simulator(post), _make_worker(post, site)] if post.simulator else [_make_worker(post, site)]


def _make_uplink(site: HostInfo, listening: socket.socket) -> ForkedProcess:
    """Return the uplink process.

    The uplink stops after the workers, because workers send their last reports over the uplink.
    """

    def run_uplink() -> None:
        end_with_parent()
        take_descriptors()
        uplink.run(site.farm, listening)

    return ForkedProcess("uplink", run_uplink, rank=1, most_pause_s=_UPLINK_PAUSE_SECONDS)


def _make_worker(post: BoardEntry, site: HostInfo) -> ForkedProcess:
    def run() -> None:
        end_with_parent()
        from hil.controller.farm.host.jobs.command_job import run_command_job
        from hil.controller.farm.host.jobs.job_attempt import use_board
        from hil.controller.farm.host.worker import BoardWorker, redirect_scratch

        def use(attempt: Attempt) -> JobResult:
            return run_command_job(attempt) if attempt.grant.spec.kind is Kind.COMMAND else use_board(attempt)

        with redirect_scratch(post, site):
            BoardWorker(post, site, use).serve()

    return ForkedProcess(post.name, run)


def _make_simulator(post: BoardEntry) -> ForkedProcess:
    """Return the agent process of a simulated board. The process ends when stdin closes."""
    main = make_module_main(_SIMULATOR, [*post.simulator, "--lifeline", "--fork-ahead"])
    return ForkedProcess(f"simulator {post.name}", main, post.folder / "agent.log", rank=1)


def _preload_modules(simulates: bool) -> None:
    os.environ[_THREADS] = "1"
    for module in _PRELOADED:
        importlib.import_module(module)
    if simulates:
        importlib.import_module(_SIMULATOR).preload_runtimes()


def _format_names(posts: Sequence[BoardEntry]) -> str:
    names = [post.name for post in posts]
    return ", ".join(names if len(names) <= _SHOWN else [*names[: _SHOWN - 1], "...", names[-1]])


def _make_host_name(home: Path) -> str:
    """Return the machine's name with a suffix stored in the home, because machines may share a name (raspberrypi)."""
    mark = home / "hosts" / "mark"
    try:
        mark.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = mark.with_name(f"mark.{os.getpid()}")
        made.write_text(secrets.token_hex(2))
        with contextlib.suppress(FileExistsError):
            mark.hardlink_to(made)
        made.unlink()
        return f"{os.uname().nodename}-{read_text(mark)}"
    except OSError as error:
        raise StorageError(f"{mark} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def _lock_folder(folder: Path, name: str) -> Iterator[None]:
    """Lock the host's directory. Raises FarmError if a host of this name is already running."""
    lock = filelock.FileLock(folder / "lock", timeout=_LOCK_SECONDS, thread_local=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise FarmError(
            f"host {name} is already running", hint="set --name to run a second host on this machine"
        ) from None
    try:
        yield
    finally:
        lock.release()
