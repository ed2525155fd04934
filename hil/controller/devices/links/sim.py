"""A simulator of our own: started as `python -m hil.sim` in another process, gone when the link is closed."""

from __future__ import annotations

import json
import select
import subprocess

from hil.controller.devices.board_client import Target
from hil.controller.devices.links.link import Link, LinkKind, Say
from hil.core.board_config import BoardConfig
from hil.core.processes import module_command, wait_or_kill
from hil.core.scratch import new_folder, remove_tree
from hil.errors import BoardUnreachable, UsageError

_START_S, _END_S = 30.0, 10.0


def start(config: BoardConfig, faults: tuple[str, ...] = (), say: Say = lambda text: None) -> Link:
    """Start a simulator for a board config and wait until it serves.

    Raises:
        UsageError: a fault is written wrongly.
        BoardUnreachable: it did not start.
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
            said = read_log().strip() or f"it did not serve within {_START_S:g} s"
            code = process.wait(5) if ready else None
            if code == UsageError.exit_code:
                message, _, hint = said.removeprefix("hil.sim: ").partition("\n  hint: ")
                raise UsageError(message, hint=hint)
            raise BoardUnreachable("the simulator did not start", board=config.name, detail=said)
        if told := [one for one in read_log().splitlines() if one.startswith("not sandboxed: ")]:
            say(f"{told[0]}; programs run on this machine with all rights that you have")
        faulty = bool(faults) or bool(config.simulator and config.simulator.faults)
        return Link(Target(json.loads(line)["address"], faults=faulty), close, read_log)
    except BaseException:
        process.kill()
        close()
        raise


KIND = LinkKind(
    "simulator",
    lambda request: start(request.config, request.faults, request.say),
    serves=lambda request: not request.address and request.config.is_simulator,
    takes_faults=True,
)
