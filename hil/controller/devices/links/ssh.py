"""Boards that are reached by SSH: an agent is put there and gRPC goes through a tunnel to it, or commands run there."""

from __future__ import annotations

import contextlib
import shlex
from typing import TYPE_CHECKING

import tenacity

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_client import BoardClient, Target
from hil.controller.devices.links.link import Link, LinkKind
from hil.controller.devices.ssh.address import is_ssh_address
from hil.errors import BoardError, BoardLost, UsageError

if TYPE_CHECKING:
    from hil.controller.devices.deploy.ensure import AgentPlace
    from hil.controller.devices.ssh.shell import Shell
    from hil.controller.devices.ssh.tunnel import Tunnel


class _AgentlessLink:
    """The shell, which is opened anew after a break."""

    def __init__(self, choice: BoardChoice) -> None:
        self._choice = choice
        self._shell = self._opened()
        self.link = Link(Target(""), self._close, renew=self._renew, shell=self._shell, connect=self._client)

    def _opened(self) -> Shell:
        from hil.controller.devices.ssh.connect import open_shell

        choice, config = self._choice, self._choice.config
        return open_shell(choice.target, config.connection, board=choice.name, base=config.path.parent)

    def _client(self, board: str) -> BoardClient:
        from hil.controller.devices.agentless.client import CommandClient

        return CommandClient(self._shell, self._choice, board=board)

    def _renew(self) -> Target:
        self._close()
        self._shell = self.link.shell = self._opened()
        return self.link.target

    def _close(self) -> None:
        with contextlib.suppress(BoardError):
            self._shell.close()


def _connect_command(choice: BoardChoice) -> Link:
    if not is_ssh_address(choice.target):
        raise UsageError(
            f"programs run by command over SSH only, and {choice.target or 'no address'} is none for that",
            board=choice.name,
            hint="--board USER@HOST, or an address in the config's [connection]",
        )
    return _AgentlessLink(choice).link


COMMAND_KIND = LinkKind(
    "command",
    _connect_command,
    serves=lambda choice: bool(choice.without_agent) or choice.config.command.kind == "command",
)


# A link that breaks while the agent is put there: what arrived is not sent again.
_TRIES = 3


class _SshLink:
    """The shell and the tunnel, which are made anew together after a break."""

    def __init__(self, choice: BoardChoice) -> None:
        self._choice = choice
        self.link = Link(Target(""), self._close, self._log, self._renew)
        self._open()

    @tenacity.retry(
        retry=tenacity.retry_if_exception_type(BoardLost),
        stop=tenacity.stop_after_attempt(_TRIES),
        wait=tenacity.wait_fixed(1.0),
        reraise=True,
    )
    def _open(self) -> None:
        from hil.controller.devices.deploy.ensure import ensure_agent
        from hil.controller.devices.ssh.connect import open_shell
        from hil.controller.devices.ssh.login import exposure
        from hil.controller.devices.ssh.transport import FileKey

        choice = self._choice
        config, settings, say = choice.config, choice.config.connection, choice.say
        self._shell: Shell = open_shell(choice.target, settings, board=choice.target, base=config.path.parent)
        for path in {hop.source.path for hop in self._shell.hops if isinstance(hop.source, FileKey)}:
            if text := exposure(path):
                say(f"{text}: ssh itself would not use it; mend it with: chmod 600 {shlex.quote(str(path))}")
        try:
            runtimes = (choice.runtime or config.runtime,)
            place = ensure_agent(self._shell, folder=settings.folder, runtimes=runtimes, board=choice.target, say=say)
            self._tunnel = self._tunnel_to(place)
        except BaseException:
            self._shell.close()
            raise
        self.link.target = Target(self._tunnel.address)
        self.link.shell = self._shell
        self.link.pushed_bytes += place.pushed_bytes
        self.link.build = place.build

    def _tunnel_to(self, place: AgentPlace) -> Tunnel:
        from hil.controller.devices.deploy.packages import COMMAND_HINT, NoAgentHere
        from hil.controller.devices.ssh.tunnel import NoTunnel, open_any_tunnel

        try:
            return open_any_tunnel(self._shell, place.socket, place.python, self._choice.say)
        except NoTunnel as error:
            raise NoAgentHere(error.message, board=self._choice.target, hint=COMMAND_HINT) from error

    def _renew(self) -> Target:
        self._close()
        self._open()
        return self.link.target

    def _close(self) -> None:
        self._tunnel.close()
        self._shell.close()

    def _log(self) -> str:
        return self._tunnel.log()


SSH_KIND = LinkKind("SSH", lambda choice: _SshLink(choice).link, is_ssh_address)
