"""dropbear, the SSH server of small boards."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from support.debian import program
from support.sshd import LOOPBACK, Sshd
from support.waiting import eventually

_PACKAGE = "dropbear-bin"


class Dropbear(Sshd):
    """Running dropbear with its own options. Keys, home directory and addresses are like those of an sshd."""

    def start(self, *options: str, kind: str = "ed25519") -> None:
        """Start dropbear with a new host key of a type, and store this key as the server's key."""
        key = self.folder / "dropbear_key"
        dropbearkey, environment = program("dropbearkey", _PACKAGE, "usr/bin/dropbearkey")
        env = {**os.environ, **environment}
        command = [str(dropbearkey), "-t", kind, "-f", str(key)]
        made = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
        public = next(line for line in made.splitlines() if line.startswith(("ssh-", "ecdsa-")))
        self.known_hosts.write_text(f"[{LOOPBACK}]:{self.port} {public}\n")
        (self.home / ".ssh").mkdir(mode=0o700, exist_ok=True)
        (self.home / ".ssh/authorized_keys").write_bytes(self.authorized.read_bytes())
        dropbear, environment = program("dropbear", _PACKAGE, "usr/sbin/dropbear")
        command = [str(dropbear), "-F", "-E", "-r", str(key), "-p", f"{LOOPBACK}:{self.port}", *options]
        namespace = ["unshare", "--mount", "sh", "-ec", self._namespace(), "sh", *command]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                namespace, env={**env, **environment}, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        eventually(lambda: "Not backgrounding" in self.log, process=self._process)


@contextlib.contextmanager
def running_dropbear(folder: Path, *options: str, kind: str = "ed25519") -> Iterator[Dropbear]:
    """dropbear that accepts the user's `identity`."""
    folder.mkdir(parents=True, exist_ok=True)
    server = Dropbear(folder)
    try:
        server.start(*options, kind=kind)
        yield server
    finally:
        server.stop()
        server.end_agents()
