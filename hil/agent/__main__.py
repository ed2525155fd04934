"""`python -m hil.agent --listen unix:PATH|HOST:PORT --store DIR`: the agent on a board.

Prints one JSON line on stdout once it serves: ``{"address": ..., "pid": ...}``. `python -m hil.agent verify BUNDLE`
serves nobody: it checks this machine against a bundle of test cases and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hil.agent import forks
from hil.agent.confinement import seclude
from hil.agent.server import Agent, AgentConfig
from hil.core.text import show_visibly
from hil.errors import HilError, UsageError
from hil.protocol.listening import take_descriptors

_LOOK_S, _SELDOM_S = 0.5, 5.0
# Without a session for so long, the agent keeps nothing in memory but itself.
_REST_S = 60.0


def parser(module: str, description: str) -> argparse.ArgumentParser:
    """The options that every agent has, a simulator's too."""
    options = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--listen", required=True, metavar="unix:PATH|HOST:PORT", help="where to serve")
    options.add_argument("--store", required=True, type=Path, metavar="DIR", help="folder for blobs and programs")
    options.add_argument("--name", default="", help="what the device is called (default: the host's name)")
    options.add_argument("--quota", type=int, default=0, metavar="BYTES", help="most that blobs may take")
    options.add_argument("--memory-limit", type=int, default=0, metavar="BYTES", help="most that a program may take")
    options.add_argument("--token-file", type=Path, metavar="FILE", help="callers must present the token in this file")
    options.add_argument("--tls-cert", type=Path, metavar="PEM", help="the server's certificate")
    options.add_argument("--tls-key", type=Path, metavar="PEM", help="the server's key")
    options.add_argument("--tls-client-ca", type=Path, metavar="PEM", help="clients must show a certificate of it")
    options.add_argument(
        "--trusted-keys", type=Path, metavar="FILE", help="load only programs of bundles signed by one of these keys"
    )
    options.add_argument("--build", default="", metavar="ID", help="what was deployed here, told to controllers")
    options.add_argument(
        "--idle-exit", type=float, default=0.0, metavar="S", help="stop after so long without a session"
    )
    options.add_argument("--lifeline", action="store_true", help="stop when stdin ends: the starter is gone")
    return options


def config_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of :class:`AgentConfig` that the options give."""
    token = ""
    if arguments.token_file:
        try:
            token = arguments.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the token file cannot be read: {error}") from error
        if not token:
            raise UsageError(f"{arguments.token_file} holds no token")
    trusted: tuple[bytes, ...] = ()
    if arguments.trusted_keys:
        from hil.bundles.signature import public_keys

        trusted = public_keys(arguments.trusted_keys)
    names = ("listen", "store", "name", "build", "memory_limit", "tls_cert", "tls_key", "tls_client_ca")
    given = {name: getattr(arguments, name) for name in names}
    return {"token": token, "quota_bytes": arguments.quota, "trusted_keys": trusted, **given}


def serve(
    agent: Agent,
    address: str,
    *,
    lifeline: bool,
    idle_exit: float = 0.0,
    may_leave: Callable[[], bool] = lambda: True,
) -> None:
    """Announce the agent, then serve until SIGTERM or SIGINT, or after SIGHUP until nobody has the device.

    Args:
        lifeline: end at the end of stdin too.
        idle_exit: end after so many seconds without a session too; 0 is never.
        may_leave: asked before it ends for that; once it says so, nobody is to come any more.
    """
    seclude()
    forks.adopt()
    take_descriptors()
    # Signals are put there, by which they are told: its put may be called in a handler, whatever that interrupts.
    told: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: told.put(got))
    if lifeline:

        def wait_for_end() -> None:
            stdin = sys.stdin.fileno()
            # Not through Python's stream, which cannot be ended while a thread reads from it.
            with contextlib.suppress(OSError):
                said = b"-"
                while said:
                    select.select([stdin], [], [])  # the starter may have made it one that does not wait
                    said = os.read(stdin, 1)
            told.put(signal.SIGTERM)

        threading.Thread(target=wait_for_end, daemon=True, name="lifeline").start()
    print(json.dumps({"address": address, "pid": os.getpid()}), flush=True)
    leaving = rested = False
    while True:
        with contextlib.suppress(queue.Empty):
            # There may be hundreds of simulated boards on a machine: none wakes up more often than it has to.
            leaving = told.get(timeout=_LOOK_S if leaving or idle_exit else _SELDOM_S) == signal.SIGHUP
            if not leaving:
                break
        idle_s = agent.idle_s()
        if (leaving and idle_s) or (0 < idle_exit < idle_s and may_leave()):
            break
        if idle_s > _REST_S and not rested:
            agent.rest()
        rested = idle_s > _REST_S
    agent.stop()


def main() -> None:
    """Start an agent, or verify a bundle."""
    show_visibly()
    if sys.argv[1:2] == ["verify"]:
        from hil.agent import verify

        sys.exit(verify.main(sys.argv[2:]))
    arguments = parser("hil.agent", __doc__ or "").parse_args()
    try:
        agent = Agent(AgentConfig(**config_of(arguments)))
    except HilError as error:
        print(f"hil.agent: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    serve(agent, agent.address, lifeline=arguments.lifeline, idle_exit=arguments.idle_exit)


if __name__ == "__main__":
    main()
