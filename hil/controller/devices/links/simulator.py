"""Link to a simulator: a reusable simulator, or a temporary simulator that ends with the link."""

from __future__ import annotations

import subprocess

from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.links import kept_simulators, simulator_process
from hil.controller.devices.links.link import Link, LinkKind
from hil.core.board_config import BoardConfig
from hil.core.files import read_end
from hil.core.installed import list_entry_points
from hil.core.processes import wait_or_kill
from hil.core.runtimes import RUNTIME_GROUP
from hil.core.scratch import make_folder, remove_tree
from hil.core.text import TextSink
from hil.core.variables import read_choice

# Environment variable, and the value "fresh": start a new simulator for each command.
VARIABLE, FRESH = "HIL_SIMULATOR", "fresh"
_END_SECONDS = 10.0


def open_simulator(config: BoardConfig, faults: tuple[str, ...] = (), say: TextSink = lambda text: None) -> Link:
    """Open a link to a simulator for a board config. Reuse a running simulator or start one.

    Simulators with faults are not reused, since a simulator counts the occurrences of a fault. While a package
    registers a runtime, simulators are not reused either, since the runtime's files may change.

    Raises:
        BoardUnreachable: The simulator does not start in time.
        UsageError: A fault has invalid syntax, or an environment variable an invalid value.
    """
    is_fresh = read_choice(VARIABLE) == FRESH
    faulty = bool(faults) or bool(config.simulator and config.simulator.faults)
    link = None
    if not faulty and not is_fresh and not list_entry_points(RUNTIME_GROUP):
        link = _borrow_link(config)
    if link is None:
        link = _own(config, faults, faulty)
    if lines := [one for one in link.log().splitlines() if one.startswith("not sandboxed: ")]:
        say(f"{lines[0]}; programs run on this machine with all your permissions")
    return link


def _borrow_link(config: BoardConfig) -> Link | None:
    loan = kept_simulators.borrow_simulator(config)
    if loan is None:
        return None
    return Link(AgentEndpoint(simulator_process.get_address(loan.folder)), loan.give_back, loan.read_output)


def _own(config: BoardConfig, faults: tuple[str, ...], faulty: bool) -> Link:
    # The paths of Unix sockets are limited (104 bytes on macOS), so do not use the user's directories.
    folder = make_folder("hil-sim-", for_sockets=True)
    try:
        given = [word for fault in faults for word in ("--fault", fault)]
        process = simulator_process.start(config, folder, "--lifeline", *given, stdin=subprocess.PIPE)
    except BaseException:
        remove_tree(folder)
        raise

    def close() -> None:
        if process.stdin:
            process.stdin.close()
        wait_or_kill(process, _END_SECONDS)
        remove_tree(folder)

    target = AgentEndpoint(simulator_process.get_address(folder), faults=faulty)
    return Link(target, close, lambda: read_end(simulator_process.log_of(folder)))


SIM_KIND = LinkKind(
    "simulator",
    lambda choice: open_simulator(choice.config, choice.faults, choice.say),
    serves=lambda choice: not choice.target and choice.config.is_simulator,
    takes_faults=True,
)
