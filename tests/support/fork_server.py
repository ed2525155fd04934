"""Run programs and hil commands in forked children, so that imports are paid once.

Usage: fork_server.py SOCKET. Each connection sends one order as a JSON line and receives ``{"code": N}``, or
``{"code": null}`` after a timeout. A closed connection kills the program. The server ends when stdin ends.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

# Most commands of the tests import these modules.
_PRELOADED = (
    "hil.controller.analysis.bench.job",
    "hil.controller.backends.compilers.iree",
    "hil.controller.backends.references.runners.onnx",
    "hil.controller.cli.board.board",
    "hil.controller.cli.farm.farm",
    "hil.controller.cli.farm.show",
    "hil.controller.cli.running.bench",
    "hil.controller.cli.running.bundle",
    "hil.controller.cli.running.compile",
    "hil.controller.cli.running.run",
    "hil.controller.cli.running.suite",
    "hil.controller.devices.agent_client.client",
    "hil.controller.devices.ssh.connect",
    "hil.controller.farm.client.client",
    "hil.controller.storage.screen.console",
    "hil.controller.workloads.run_job",
    "hil.controller.workloads.suites.job",
)


def run_child(order: dict[str, Any]) -> None:
    """Become the program of an order. Never returns."""
    flags = {0: os.O_RDONLY, 1: os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 2: os.O_WRONLY | os.O_CREAT | os.O_TRUNC}
    for number, (name, flag) in enumerate(zip(order["streams"], flags.values(), strict=True)):
        opened = os.open(name, flag, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = order["argv"]
    # As `python -m` does.
    sys.path[0] = order["cwd"]
    if sys.argv[0] == "hil":
        from hil.controller.cli.main import main

        main()
    else:
        os.execvp(sys.argv[0], sys.argv)


def wait_for(child: int, timeout: float, connection: socket.socket) -> int | None:
    """Return a child's exit code. After the timeout, or if the client leaves, kill the child's session, return None."""
    handle = os.pidfd_open(child)
    ready, _, _ = select.select([handle, connection], [], [], timeout)
    if handle not in ready:
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if handle in ready else None


def handle_order(connection: socket.socket) -> dict[str, Any]:
    """Read an order, and run it in a child. Return the order in the child, and never in the parent."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection:
        order: dict[str, Any] = json.loads(connection.makefile("r").readline())
        child = os.fork()
        if child == 0:
            os.setsid()
            return order
        code = wait_for(child, order["timeout"], connection)
        connection.sendall(json.dumps({"code": code}).encode() + b"\n")
    os._exit(0)


def serve(path: Path) -> dict[str, Any] | None:
    """Accept connections until stdin ends. Return an order in each child that runs one, and None in the server."""
    # The kernel removes ended children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(64)
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                return handle_order(connection)
            connection.close()
    return None


if __name__ == "__main__":
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.freeze()
    if (taken := serve(Path(sys.argv[1]))) is not None:
        run_child(taken)
