"""The host of boards: a process a board, one more for each that it simulates, and one that talks with the farm."""

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

import filelock

from hil.controller.farm.host import uplink
from hil.controller.farm.host.inventory import BoardEntry, HostInfo, checked, find_boards, make_simulators, sockets_for
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.processes import ForkedProcess, PreforkSupervisor, end_with_parent, module_main
from hil.errors import FarmError, StorageError, UsageError
from hil.protocol.listening import take_descriptors

# What workers and simulators use: imported once, before they are forked.
_WORKER = "hil.controller.farm.host.worker"
_SIMULATOR = "hil.sim.__main__"
_PRELOADED = (
    _WORKER,
    "hil.controller.farm.host.job_attempt",
    "hil.controller.workloads.board_checks",
    "hil.controller.workloads.run_job",
    "hil.controller.devices.links.agent",
    "hil.controller.devices.ssh.known_hosts",
    "hil.controller.backends.compilers.executorch",
    "hil.controller.backends.compilers.tfcompile",
    "hil.controller.backends.references.onnx",
    "hil.controller.backends.references.iree_llvm_cpu",
    "hil.controller.workloads.bundles.run",
    "hil.controller.workloads.suites.job",
    "grpc._channel",
    "ml_dtypes",
    "numpy.random",
)
# numpy's threads do not outlive a fork.
_THREADS = "OPENBLAS_NUM_THREADS"
# A host that was killed may have children that have not noticed yet.
_LOCK_S = 15.0
# However often the connection's process dies: no lease runs out meanwhile.
_UPLINK_PAUSE_S = 1.0
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
    say: Callable[[str], None],
) -> None:
    """Serve boards to a farm until SIGTERM or Ctrl-C.

    Args:
        home: the farm's folder on this machine; the host's own is below it.
        name: the host's, which no other one of the farm may have; "" is the machine's, with something that tells it
            from others that are called so.
        boards: names or files of configs; none are all here that have an address, unless there are simulators.

    Raises:
        UsageError: there is nothing to serve.
        FarmError: a host of this name runs here already.
        StorageError: its folder cannot be written.
    """
    name = checked(name) if name else _own_name(home)
    folder = home / "hosts" / name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / "files").mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror}") from error
    with _exclusive(folder, name), contextlib.ExitStack() as afterwards:
        place = HostInfo(name, site, farm, folder, sockets_for(folder))
        afterwards.callback(shutil.rmtree, place.sockets, ignore_errors=True)
        posts = make_simulators(place, simulators, faults) if simulators else []
        if boards or not simulators:
            posts += find_boards(place, boards)
        if not posts:
            raise UsageError(
                "there are no boards here",
                hint="--board NAME|FILE, --sim N, or configs with an address in board_configs",
            )
        place = replace(place, boards=len(posts))
        for post in posts:
            post.folder.mkdir(parents=True, exist_ok=True)
        _preload(simulators > 0)
        say(f"host {name}: {len(posts)} board{'s' * (len(posts) > 1)}: {_few(posts)}")
        listening = afterwards.enter_context(uplink.listen(place.uplink))
        children = [_uplink(place, listening), *(child for post in posts for child in _children_of(post, place))]
        PreforkSupervisor(children, say).run()


def _children_of(post: BoardEntry, site: HostInfo) -> list[ForkedProcess]:
    return [_simulator(post), _worker(post, site)] if post.simulator else [_worker(post, site)]


def _uplink(site: HostInfo, listening: socket.socket) -> ForkedProcess:
    """The connection to the farm: it outlives the workers, which say how their last jobs ended."""

    def work() -> None:
        end_with_parent()
        take_descriptors()
        uplink.run(site.farm, listening)

    return ForkedProcess("uplink", work, rank=1, most_pause_s=_UPLINK_PAUSE_S)


def _worker(post: BoardEntry, site: HostInfo) -> ForkedProcess:
    def run() -> None:
        end_with_parent()
        from hil.controller.farm.host.job_attempt import use_board
        from hil.controller.farm.host.worker import Worker, scratch_folder

        with scratch_folder(post, site):
            Worker(post, site, use_board).serve()

    return ForkedProcess(post.name, run)


def _simulator(post: BoardEntry) -> ForkedProcess:
    """The simulated board's agent; it ends when its standard input does, as the host's children have it."""
    main = module_main(_SIMULATOR, [*post.simulator, "--lifeline", "--fork-ahead"])
    return ForkedProcess(f"simulator {post.name}", main, post.folder / "agent.log", rank=1)


def _preload(simulates: bool) -> None:
    os.environ[_THREADS] = "1"
    for module in _PRELOADED:
        importlib.import_module(module)
    if simulates:
        importlib.import_module(_SIMULATOR).preload_runtimes()


def _few(posts: Sequence[BoardEntry]) -> str:
    names = [post.name for post in posts]
    return ", ".join(names if len(names) <= _SHOWN else [*names[: _SHOWN - 1], "...", names[-1]])


def _own_name(home: Path) -> str:
    """The machine's name and a mark that stays with the folder: two machines may well be called raspberrypi."""
    mark = home / "hosts" / "mark"
    try:
        mark.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = mark.with_name(f"mark.{os.getpid()}")
        made.write_text(secrets.token_hex(2))
        with contextlib.suppress(FileExistsError):
            mark.hardlink_to(made)
        made.unlink()
        return f"{os.uname().nodename}-{mark.read_text()}"
    except OSError as error:
        raise StorageError(f"{mark} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def _exclusive(folder: Path, name: str) -> Iterator[None]:
    """No other host of this name runs on this machine."""
    lock = filelock.FileLock(folder / "lock", timeout=_LOCK_S, thread_local=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise FarmError(f"a host {name} runs here already", hint="--name tells two on one machine apart") from None
    try:
        yield
    finally:
        lock.release()
