"""A board without an agent: commands run on it over SSH."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hil.controller.devices.board_client import BoardClient, Target
from hil.controller.devices.links.link import Link, LinkKind, LinkRequest
from hil.controller.devices.ssh.address import is_ssh_address
from hil.errors import BoardError, UsageError

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell


class _AgentlessLink:
    """The shell, which is opened anew after a break."""

    def __init__(self, request: LinkRequest) -> None:
        self._request = request
        self._shell = self._opened()
        self.link = Link(Target(""), self._close, renew=self._renew, shell=self._shell, connect=self._client)

    def _opened(self) -> Shell:
        from hil.controller.devices.ssh.connect import open_shell

        request, config = self._request, self._request.config
        return open_shell(request.address, config.connection, board=request.board, base=config.path.parent)

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


def _connect(request: LinkRequest) -> Link:
    if not is_ssh_address(request.address):
        raise UsageError(
            f"programs run by command over SSH only, and {request.address or 'no address'} is none for that",
            board=request.board,
            hint="--board USER@HOST, or an address in the config's [connection]",
        )
    return _AgentlessLink(request).link


KIND = LinkKind(
    "command",
    _connect,
    serves=lambda request: bool(request.without_agent) or request.config.command.kind == "command",
)
