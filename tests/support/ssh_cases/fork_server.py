"""Run programs and hil commands in forked children, for one user in a mount namespace: imports are paid once.

Reads one JSON order a line from stdin, runs it to its end, and writes ``{"code": N}`` or ``{"code": null}`` (timeout).
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from typing import Any


def run_child(order: dict[str, Any]) -> None:
    """Become the program of an order. Never returns."""
    os.setsid()
    flags = {0: os.O_RDONLY, 1: os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 2: os.O_WRONLY | os.O_CREAT | os.O_TRUNC}
    for number, (name, flag) in enumerate(zip(order["streams"], flags.values(), strict=True)):
        opened = os.open(name, flag, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    argv = order["argv"]
    if argv[0] != "hil":
        os.execvp(argv[0], argv)
    from hil.controller.cli.main import main

    sys.argv = argv
    main()


def wait_for(child: int, timeout: float) -> int | None:
    """Return a child's exit code. After the timeout, kill its session and return None."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def serve() -> None:
    """Run orders until stdin ends."""
    for name in ("hil.controller.cli.board.board", "hil.controller.devices.ssh.connect"):
        importlib.import_module(name)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                run_child(order)
            except BaseException as error:
                if not isinstance(error, SystemExit):
                    sys.excepthook(type(error), error, error.__traceback__)
                    os._exit(99)
                raise
        print(json.dumps({"code": wait_for(child, order["timeout"])}), flush=True)


if __name__ == "__main__":
    serve()
