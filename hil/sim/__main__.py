"""`python -m hil.sim --listen unix:PATH|HOST:PORT --store DIR [--config FILE] [--fault FAULT ...]`: a simulated board.

The simulated board runs the real agent server and protocol. A board config with a [simulator] table describes the
device. Faults are set in that table and with --fault. The simulator prints one JSON line on stdout when ready:
{"address": ..., "pid": ...}.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hil.agent import forkserver, machine
from hil.agent.__main__ import make_parser, read_config, serve
from hil.agent.confinement import SANDBOX_VARIABLE, find_sandbox_error
from hil.agent.runtimes import is_described_apart, list_runtimes
from hil.agent.server import Agent, AgentConfig
from hil.agent.store import BlobStore, Quota, Upload
from hil.core.board_config import BoardConfig
from hil.core.boards import load_board
from hil.core.processes import ForkedChild, wait_or_kill
from hil.core.runtimes import RUNTIMES, list_known_runtimes
from hil.core.scratch import remove_tree
from hil.core.text import show_visibly
from hil.core.variables import read_choice
from hil.errors import HilError, UsageError
from hil.protocol.listening import refuse_if_served, refuse_if_taken
from hil.sim import faults
from hil.sim.conditions import SimConditions
from hil.sim.faults import SimClock
from hil.sim.link import FaultyLink
from hil.sim.references import make_reference

# Sandbox modes: use the sandbox if the kernel supports it, always, or never.
SANDBOX = AUTO, REQUIRED, OFF = "auto", "required", "off"
# Timeout for importing a runtime's library.
_PRELOAD_SECONDS = 120.0


class DroppingStore(BlobStore):
    """Store that cuts the link during an upload, after a share of the bytes has arrived."""

    def __init__(self, root: Path, quota: Quota, fault: faults.Fault, charges: faults.Charges) -> None:
        super().__init__(root, quota)
        self._fault = fault
        self._charges = charges
        self.link: FaultyLink | None = None

    def upload(self, digest: str, size: int, offset: int) -> Upload:
        """Start an upload that cuts the link after a share of the bytes has arrived."""
        upload = super().upload(digest, size, offset)
        write = upload.write
        mark = upload.missing - int(upload.missing * self._fault.keys["at"])

        def write_and_cut(data: memoryview) -> None:
            if upload.missing >= mark >= upload.missing - data.nbytes and self._charges.should_fire(self._fault):
                write(data[: upload.missing - mark])
                if self.link:
                    self.link.cut()
                raise ConnectionAbortedError("simulated: the connection was dropped")
            write(data)

        upload.write = write_and_cut  # type: ignore[method-assign]
        return upload


def start(options: dict[str, Any], board: BoardConfig, fault_texts: list[str], sandbox: str = OFF) -> tuple[Agent, str]:
    """Start a simulated board's agent. Return the agent and the address.

    Args:
        options: fields of :class:`AgentConfig`.
        board: board config with a [simulator] table.
        fault_texts: faults in addition to the config's.
        sandbox: sandbox mode for programs, from :data:`SANDBOX`.

    Raises:
        UsageError: a fault is invalid, listening failed, or a required sandbox is not available.
    """
    if board.simulator is None:
        raise UsageError(f"{board.path} does not configure a simulator", hint="add a [simulator] table")
    known = [faults.parse(text) for text in [*board.simulator.faults, *fault_texts]]
    found = [one for one in known if faults.has_required_stack(one, board.stack)]
    charges = faults.Charges(options["store"] / "faults")
    by_name = {fault.name: fault for fault in found}
    public = options["listen"]
    slow = by_name.get("slow")
    link_wanted = slow or "drop" in by_name
    if link_wanted:
        options = {**options, "listen": f"unix:{options['store']}/inner.sock"}
    stores: list[DroppingStore] = []

    def make_store(root: Path, quota: Quota) -> BlobStore:
        charges.arm(found)  # only after locking the store, which another simulator may use
        conditions = SimConditions(found, root / "faults")
        if conditions.are_simulated:
            machine.replace_readings(conditions.change_readings)
        if "kill-agent" in by_name:
            faults.watch_for_end(root)
        if "clock" in by_name:
            SimClock.start(root)
            SimClock(by_name["clock"], root).install()
        if "drop" not in by_name:
            return BlobStore(root, quota)
        stores.append(DroppingStore(root, quota, by_name["drop"], charges))
        return stores[0]

    boxed, unboxed = _choose_sandbox(sandbox, options["store"], found)
    inner = {
        **boxed,
        "faults": [str(fault) for fault in found],
        "store": str(options["store"]),
        "arithmetic": board.simulator.arithmetic,
    }
    config = AgentConfig(
        **{
            **options,
            "name": options.get("name") or board.name,
            "memory_limit": options.get("memory_limit") or board.simulator.memory_limit,
        },
        runtimes={name: make_reference(name) for name in list_runtimes()},
        runtime_options=inner,
        simulated=[board.name, *unboxed, *(str(fault) for fault in found)],
        make_store=make_store,
    )
    if public.startswith("unix:"):
        refuse_if_served(public[len("unix:") :])
    else:
        refuse_if_taken(public)
    agent = Agent(config)
    if not link_wanted:
        return agent, agent.address
    keys = slow.keys if slow else {"rate": 0.0, "delay": 0.0}
    try:
        link = FaultyLink(public, agent.address, keys["rate"], keys["delay"])
    except OSError as error:
        agent.stop()
        raise UsageError(f"cannot listen on {public}: {error}") from error
    for store in stores:
        store.link = link
    return agent, link.address


def _choose_sandbox(sandbox: str, store: Path, found: Sequence[faults.Fault]) -> tuple[dict[str, Any], list[str]]:
    """Return the workers' sandbox option, and a note for Describe if the sandbox is missing."""
    if sandbox == OFF:
        return {}, []
    store.joinpath("faults").mkdir(parents=True, exist_ok=True)
    # These faults count occurrences, loads or runs in files, or store the time of the first run, so workers need write
    # access.
    counted = any(
        fault.keys.get("times") or fault.keys.get("when") == "reload" or fault.name in ("wedge", "throttle")
        for fault in found
    )
    writable = [store.absolute() / "faults"] if counted else []
    # These faults reach outside the worker: they change the shared clock or kill the agent.
    reaching = [fault.name for fault in found if fault.name in ("clock", "kill-agent")]
    why = f"fault {reaching[0]} does not work in a sandbox" if reaching else find_sandbox_error(writable)
    if not why:
        return {"sandbox": [str(path) for path in writable]}, []
    if sandbox == REQUIRED:
        raise UsageError(f"sandbox unavailable: {why}", hint="use --no-sandbox to run programs with your permissions")
    note = f"not sandboxed: {why}"
    print(note, file=sys.stderr, flush=True)
    return {}, [note]


def preload_runtimes() -> None:
    """Import the modules that fork servers need, before this process forks simulated boards.

    A library may crash or hang the importing process, so a child process tries the import first. Runtimes of packages
    are not imported, because their libraries may not support a fork.
    """
    known = list_known_runtimes()
    for name in RUNTIMES:
        if not known[name].of_package and is_described_apart(name):
            tried = ForkedChild(functools.partial(forkserver.preload, make_reference(name)))
            if wait_or_kill(tried, _PRELOAD_SECONDS) == 0:
                forkserver.preload(make_reference(name))


def _make_lock(folder: Path) -> Callable[[], bool]:
    """Return a function that tries to lock a directory permanently. It returns True on success."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def take() -> bool:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    return take


def main() -> None:
    """Start a simulated board."""
    show_visibly()
    options = make_parser("hil.sim", __doc__ or "")
    options.add_argument("--config", default="sim", metavar="FILE|NAME", help="board config with a [simulator] table")
    options.add_argument("--fault", action="append", default=[], metavar="FAULT", help="see docs/simulator.md")
    options.add_argument(
        "--sandbox",
        choices=SANDBOX,
        help="run programs without network or writable files (default auto: if the kernel supports it)",
    )
    options.add_argument(
        "--fork-ahead",
        action="store_true",
        help="import the runtimes at startup, and fork their processes from the simulator",
    )
    options.add_argument(
        "--kept",
        action="store_true",
        help="remove the parent directory of --store at exit (with --idle-exit: when no process locks it)",
    )
    arguments = options.parse_args()
    try:
        config = read_config(arguments) | {"fork_ahead": arguments.fork_ahead}
        sandbox = arguments.sandbox or read_choice(SANDBOX_VARIABLE)
        agent, address = start(config, load_board(arguments.config).config, arguments.fault, sandbox)
    except HilError as error:
        print(f"hil.sim: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    folder = arguments.store.parent
    may_leave: Callable[[], bool] = _make_lock(folder) if arguments.kept else lambda: True
    serve(agent, address, lifeline=arguments.lifeline, idle_exit=arguments.idle_exit, may_leave=may_leave)
    if arguments.kept and may_leave():
        remove_tree(folder)


if __name__ == "__main__":
    main()
