"""Connect to boards with the address prefix ``npx:``."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hil.plugins import AgentEndpoint, BoardConfig, BoardUnreachable, Link, UsageError


def connect(address: str, config: BoardConfig) -> Link:
    """Open the link to ``npx:local``, the development kit on this machine.

    A process of hil's agent on this machine stands for the kit. A link to hardware would open the kit's USB port here
    and return the address of the agent that runs on the kit.
    """
    place = address.partition(":")[2]
    if place != "local":
        raise UsageError(f"unknown development kit {place!r}", hint="expected npx:local")
    folder = Path(tempfile.mkdtemp(prefix="npx-"))
    target = f"unix:{folder}/agent.sock"
    # With --lifeline, the agent ends when this process closes the pipe or ends.
    command = [sys.executable, "-m", "hil.agent", "--listen", target, "--store", str(folder / "store"), "--lifeline"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close() -> None:
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)

    if process.stdout is None or not process.stdout.readline():
        close()
        raise BoardUnreachable("the development kit did not start", hint="run `python -m hil.agent --help`")
    return Link(AgentEndpoint(target), close)
