"""`python -m hil.agent --listen unix:PATH|HOST:PORT --store DIR`: run the agent on a board.

Prints one JSON line on stdout when it is ready: ``{"address": ..., "pid": ...}``. `python -m hil.agent verify BUNDLE`
does not start a server: it runs the test cases of a bundle on this machine and exits.
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
from hil.agent.store import Quota
from hil.core.text import show_visibly
from hil.errors import HilError, UsageError
from hil.protocol.listening import take_descriptors

_LOOK_S, _SELDOM_S = 0.5, 5.0
# After this many seconds without a session, stop workers and fork servers to free memory.
_REST_SECONDS = 60.0


def make_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Return an argument parser with the options that agents and simulators share."""
    options = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--listen", required=True, metavar="unix:PATH|HOST:PORT", help="address to serve")
    options.add_argument("--store", required=True, type=Path, metavar="DIR", help="directory for blobs and programs")
    options.add_argument("--name", default="", help="name of the board (default: the host name)")
    options.add_argument(
        "--quota",
        type=Quota.parse,
        default=Quota(),
        metavar="BYTES|SHARE%",
        help="evict unused blobs when the store exceeds this size or share of the free disk (default 50%%)",
    )
    options.add_argument("--memory-limit", type=int, default=0, metavar="BYTES", help="memory limit of a program")
    options.add_argument("--token-file", type=Path, metavar="FILE", help="file with a token that callers must send")
    options.add_argument("--tls-cert", type=Path, metavar="PEM", help="server certificate")
    options.add_argument("--tls-key", type=Path, metavar="PEM", help="server key")
    options.add_argument(
        "--tls-client-ca", type=Path, metavar="PEM", help="require client certificates signed by this CA"
    )
    options.add_argument(
        "--trusted-keys",
        type=Path,
        metavar="FILE",
        help="load only programs from bundles that are signed with one of these keys",
    )
    options.add_argument(
        "--build", default="", metavar="ID", help="build ID of a deployed agent, which the agent sends to controllers"
    )
    options.add_argument(
        "--idle-exit", type=float, default=0.0, metavar="S", help="stop after this many seconds without a session"
    )
    options.add_argument(
        "--lifeline", action="store_true", help="stop when stdin closes, because the parent process has ended"
    )
    return options


def read_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of :class:`AgentConfig` that the command-line options set.

    Raises:
        UsageError: the token file is unreadable or empty.
    """
    token = ""
    if arguments.token_file:
        try:
            token = arguments.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the token file cannot be read: {error}") from error
        if not token:
            raise UsageError(f"{arguments.token_file} is empty: expected a token")
    trusted: tuple[bytes, ...] = ()
    if arguments.trusted_keys:
        from hil.bundles.signature import read_public_keys

        trusted = read_public_keys(arguments.trusted_keys)
    names = ("listen", "store", "name", "build", "memory_limit", "tls_cert", "tls_key", "tls_client_ca")
    given = {name: getattr(arguments, name) for name in names}
    return {"token": token, "quota": arguments.quota, "trusted_keys": trusted, **given}


def serve(
    agent: Agent,
    address: str,
    *,
    lifeline: bool,
    idle_exit: float = 0.0,
    may_leave: Callable[[], bool] = lambda: True,
) -> None:
    """Print the agent's address, then serve until SIGTERM or SIGINT. After SIGHUP, exit when the last session ends.

    Args:
        lifeline: also exit when stdin reaches end of file.
        idle_exit: also exit after this many seconds without a session; 0 disables it.
        may_leave: called before an idle exit. If the function returns True, the agent exits. The function must then
            also reject new clients.
    """
    seclude()
    forks.adopt_orphans()
    take_descriptors()
    # SimpleQueue.put is reentrant, so signal handlers may call it at any point.
    told: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: told.put(got))
    if lifeline:

        def wait_for_end() -> None:
            stdin = sys.stdin.fileno()
            # Python's stdin object cannot be closed while a thread reads from it, so read the file descriptor.
            with contextlib.suppress(OSError):
                said = b"-"
                while said:
                    select.select([stdin], [], [])  # the parent may have made stdin non-blocking
                    said = os.read(stdin, 1)
            told.put(signal.SIGTERM)

        threading.Thread(target=wait_for_end, daemon=True, name="lifeline").start()
    print(json.dumps({"address": address, "pid": os.getpid()}), flush=True)
    leaving = rested = False
    while True:
        with contextlib.suppress(queue.Empty):
            # A machine may run hundreds of simulated boards, so keep wake-ups rare.
            leaving = told.get(timeout=_LOOK_S if leaving or idle_exit else _SELDOM_S) == signal.SIGHUP
            if not leaving:
                break
        idle_s = agent.get_idle_seconds()
        if (leaving and idle_s) or (0 < idle_exit < idle_s and may_leave()):
            break
        if idle_s > _REST_SECONDS and not rested:
            agent.stop_spares()
        rested = idle_s > _REST_SECONDS
    agent.stop()


def main() -> None:
    """Start an agent, or verify a bundle."""
    show_visibly()
    if sys.argv[1:2] == ["verify"]:
        from hil.agent import verify

        sys.exit(verify.main(sys.argv[2:]))
    options = make_parser("hil.agent", __doc__ or "")
    options.add_argument(
        "--claim-board",
        action="store_true",
        help="reserve the machine during a session: other agents with --claim-board wait",
    )
    arguments = options.parse_args()
    try:
        agent = Agent(AgentConfig(**read_config(arguments), claim_board=arguments.claim_board))
    except HilError as error:
        print(f"hil.agent: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    serve(agent, agent.address, lifeline=arguments.lifeline, idle_exit=arguments.idle_exit)


if __name__ == "__main__":
    main()
