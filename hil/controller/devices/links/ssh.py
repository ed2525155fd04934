"""Boards that are reached by SSH: an agent is put there and gRPC goes through a tunnel to it, or commands run there."""

from __future__ import annotations

import contextlib
import shlex
from typing import TYPE_CHECKING

import tenacity

from hil.controller.devices.board_client import BoardClient, Target
from hil.controller.devices.links.link import BoardRequest, Link, LinkKind
from hil.controller.devices.ssh.address import is_ssh_address
from hil.errors import BoardError, BoardLost, UsageError

if TYPE_CHECKING:
    from hil.controller.devices.deploy.ensure import AgentPlace
    from hil.controller.devices.ssh.shell import Shell
    from hil.controller.devices.ssh.tunnel import Tunnel


class _AgentlessLink:
    """The shell, which is opened anew after a break."""

    def __init__(self, request: BoardRequest) -> None:
        self._request = request
        self._shell = self._opened()
        self.link = Link(Target(""), self._close, renew=self._renew, shell=self._shell, connect=self._client)

    def _opened(self) -> Shell:
        from hil.controller.devices.ssh.connect import open_shell

        request, config = self._request, self._request.config
        return open_shell(request.target, config.connection, board=request.board, base=config.path.parent)

    def _client(self, board: str) -> BoardClient:
        from hil.controller.devices.agentless.client import CommandClient

        request = self._request
        return CommandClient(
            self._shell,
            request.config,
            board=board,
            runtime=request.runtime,
            why=request.without_agent or "its config asks for none",
            wait_s=request.wait_s,
        )

    def _renew(self) -> Target:
        self._close()
        self._shell = self.link.shell = self._opened()
        return self.link.target

    def _close(self) -> None:
        with contextlib.suppress(BoardError):
            self._shell.close()


def _connect_command(request: BoardRequest) -> Link:
    if not is_ssh_address(request.target):
        raise UsageError(
            f"programs run by command over SSH only, and {request.target or 'no address'} is none for that",
            board=request.board,
            hint="--board USER@HOST, or an address in the config's [connection]",
        )
    return _AgentlessLink(request).link


COMMAND_KIND = LinkKind(
    "command",
    _connect_command,
    serves=lambda request: bool(request.without_agent) or request.config.command.kind == "command",
)


# A link that breaks while the agent is put there: what arrived is not sent again.
_TRIES = 3


class _SshLink:
    """The shell and the tunnel, which are made anew together after a break."""

    def __init__(self, request: BoardRequest) -> None:
        self._request = request
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
        from hil.controller.devices.ssh.connect import exposure, open_shell
        from hil.controller.devices.ssh.transport import FileKey

        request = self._request
        config, settings, say = request.config, request.config.connection, request.say
        self._shell: Shell = open_shell(request.target, settings, board=request.target, base=config.path.parent)
        for path in {hop.source.path for hop in self._shell.hops if isinstance(hop.source, FileKey)}:
            if text := exposure(path):
                say(f"{text}: ssh itself would not use it; mend it with: chmod 600 {shlex.quote(str(path))}")
        try:
            runtimes = (request.runtime or config.runtime,)
            place = ensure_agent(self._shell, folder=settings.folder, runtimes=runtimes, board=request.target, say=say)
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
            return open_any_tunnel(self._shell, place.socket, place.python, self._request.say)
        except NoTunnel as error:
            raise NoAgentHere(error.message, board=self._request.target, hint=COMMAND_HINT) from error

    def _renew(self) -> Target:
        self._close()
        self._open()
        return self.link.target

    def _close(self) -> None:
        self._tunnel.close()
        self._shell.close()

    def _log(self) -> str:
        return self._tunnel.log()


SSH_KIND = LinkKind("SSH", lambda request: _SshLink(request).link, is_ssh_address)
