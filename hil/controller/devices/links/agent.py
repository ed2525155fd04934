"""Agents that need no login: one that listens (Unix socket, loopback, TLS port), or a simulator that is started here.

The simulator ends with the link.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import subprocess

from hil.controller.devices.board_client import Target
from hil.controller.devices.links.link import Link, LinkKind
from hil.controller.storage.paths import located
from hil.core.board_config import BoardConfig
from hil.core.processes import module_command, wait_or_kill
from hil.core.scratch import new_folder, remove_tree
from hil.core.text import TextSink
from hil.errors import BoardUnreachable, UsageError

_PROBE_S = 1.0
TOKEN_VARIABLE = "HIL_AGENT_TOKEN"
_PORTS = range(1, 1 << 16)
_ADDRESS = re.compile(r"unix:.+|[^@/\s]+:\d{1,5}")


def is_agent_address(text: str) -> bool:
    """Whether a text is an address and not a board's name."""
    return bool(_ADDRESS.fullmatch(text))


def connect(address: str, config: BoardConfig) -> Link:
    """The link to an address; token and TLS files come from the config, the token also from ``HIL_AGENT_TOKEN``.

    Raises:
        UsageError: it is no such address, or a file of the config cannot be read.
        BoardUnreachable: there is no such socket, or nobody listens on it.
    """
    if not is_agent_address(address) or (
        not address.startswith("unix:") and int(address.rpartition(":")[2]) not in _PORTS
    ):
        raise UsageError(f"{address!r} is no address of an agent", hint="unix:PATH or HOST:PORT")
    settings = config.connection
    names = (settings.token_file, settings.ca, settings.cert, settings.key)
    token_file, ca, cert, key = (located(name, config.path.parent, board=config.name) for name in names)
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token_file:
        try:
            token = token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the token file of board {config.name} cannot be read: {error}") from error
    _check(address, config.name if address == settings.address else address)
    return Link(Target(address, token, ca, cert, key))


def _check(address: str, board: str) -> None:
    """Say at once what gRPC would find out by trying for as long as it may: somebody listens there, or nobody does."""
    try:
        # A server that is busy, or far away, may take longer, and is there all the same.
        with contextlib.suppress(TimeoutError, BlockingIOError):
            _probe(address)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        if isinstance(error, FileNotFoundError):
            why = "there is no such socket"
        elif isinstance(error, (socket.gaierror, UnicodeError)):
            why = "there is no such host"
        raise BoardUnreachable(
            f"no agent answers at {address}: {why}",
            board=board,
            hint=f"is it running there? start one with: python -m hil.agent --listen {address} --store DIR",
        ) from error


def _probe(address: str) -> None:
    if address.startswith("unix:"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_S)
            probe.connect(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()


AGENT_KIND = LinkKind("agent", lambda choice: connect(choice.target, choice.config), is_agent_address)


_START_S, _END_S = 30.0, 10.0


def start_simulator(config: BoardConfig, faults: tuple[str, ...] = (), say: TextSink = lambda text: None) -> Link:
    """Start a simulator for a board config and wait until it serves (BoardUnreachable).

    Raises UsageError where a fault is written wrongly.
    """
    # Unix socket paths are short by law (104 bytes on macOS), so not below the user's own deep folders.
    folder = new_folder("hil-sim-", for_sockets=True)
    command = module_command("hil.sim", "--config", str(config.path), "--lifeline")
    command += ["--listen", f"unix:{folder}/sim.sock", "--store", str(folder / "store")]
    for fault in faults:
        command += ["--fault", fault]
    log = (folder / "log").open("w+")
    # A session of its own: Ctrl-C in the terminal is the controller's to handle.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
    )

    def read_log() -> str:
        return (folder / "log").read_text(errors="replace")

    def close() -> None:
        for stream in (process.stdin, process.stdout):
            if stream:
                stream.close()
        wait_or_kill(process, _END_S)
        log.close()
        remove_tree(folder)

    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], _START_S)
        line = process.stdout.readline() if ready else b""
        if not line:
            printed = read_log().strip() or f"it did not serve within {_START_S:g} s"
            code = process.wait(5) if ready else None
            if code == UsageError.exit_code:
                message, _, hint = printed.removeprefix("hil.sim: ").partition("\n  hint: ")
                raise UsageError(message, hint=hint)
            raise BoardUnreachable("the simulator did not start", board=config.name, detail=printed)
        if lines := [one for one in read_log().splitlines() if one.startswith("not sandboxed: ")]:
            say(f"{lines[0]}; programs run on this machine with all rights that you have")
        faulty = bool(faults) or bool(config.simulator and config.simulator.faults)
        return Link(Target(json.loads(line)["address"], faults=faulty), close, read_log)
    except BaseException:
        process.kill()
        close()
        raise


SIM_KIND = LinkKind(
    "simulator",
    lambda choice: start_simulator(choice.config, choice.faults, choice.say),
    serves=lambda choice: not choice.target and choice.config.is_simulator,
    takes_faults=True,
)
