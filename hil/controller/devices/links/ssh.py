"""A board that is reached by SSH alone: an agent is put there where none is, and gRPC goes through a tunnel to it."""

from __future__ import annotations

import shlex

import tenacity

from hil.controller.devices.client import Target
from hil.controller.devices.deploy import AgentPlace, NoAgentHere, ensure_agent
from hil.controller.devices.deploy.trouble import COMMAND_HINT
from hil.controller.devices.links.link import Link, Say
from hil.controller.devices.ssh.login import FileKey, exposure
from hil.controller.devices.ssh.shell import Shell, open_shell
from hil.controller.devices.ssh.tunnel import NoWay, Tunnel, open_any_tunnel
from hil.core.boards import BoardConfig
from hil.errors import BoardLost

# A link that breaks while the agent is put there: what arrived is not sent again.
_TRIES = 3


def connect(address: str, config: BoardConfig, *, runtime: str, say: Say) -> Link:
    """The link to a board over SSH; its agent is deployed and started where that is needed.

    Raises:
        UsageError: the address or a file of the config is wrong.
        BoardRefused: the board does not let us in.
        BoardUnreachable: nobody answers.
        BoardError: no agent can run there.
    """
    return _SshLink(address, config, runtime, say).link


class _SshLink:
    """The shell and the tunnel, which are made anew together after a break."""

    def __init__(self, address: str, config: BoardConfig, runtime: str, say: Say) -> None:
        self._address = address
        self._config = config
        self._runtime = runtime
        self._say = say
        self.link = Link(Target(""), self._close, self._log, self._renew)
        self._open()

    @tenacity.retry(
        retry=tenacity.retry_if_exception_type(BoardLost),
        stop=tenacity.stop_after_attempt(_TRIES),
        wait=tenacity.wait_fixed(1.0),
        reraise=True,
    )
    def _open(self) -> None:
        settings = self._config.connection
        self._shell: Shell = open_shell(self._address, settings, board=self._address, base=self._config.path.parent)
        for path in {hop.source.path for hop in self._shell.hops if isinstance(hop.source, FileKey)}:
            if words := exposure(path):
                self._say(f"{words}: ssh itself would not use it; mend it with: chmod 600 {shlex.quote(str(path))}")
        try:
            place = ensure_agent(
                self._shell,
                folder=settings.folder,
                runtimes=(self._runtime or self._config.runtime,),
                board=self._address,
                say=self._say,
            )
            self._tunnel = self._tunnel_to(place)
        except BaseException:
            self._shell.close()
            raise
        self.link.target = Target(self._tunnel.address)
        self.link.shell = self._shell
        self.link.pushed_bytes += place.pushed_bytes
        self.link.build = place.build

    def _tunnel_to(self, place: AgentPlace) -> Tunnel:
        try:
            return open_any_tunnel(self._shell, place.socket, place.python, self._say)
        except NoWay as error:
            raise NoAgentHere(error.message, board=self._address, hint=COMMAND_HINT) from error

    def _renew(self) -> Target:
        self._close()
        self._open()
        return self.link.target

    def _close(self) -> None:
        self._tunnel.close()
        self._shell.close()

    def _log(self) -> str:
        return self._tunnel.log()
