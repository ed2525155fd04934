"""Links over SSH: install an agent and tunnel gRPC to it, or run shell commands."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_client import AgentEndpoint, BoardClient
from hil.controller.devices.links.link import Capabilities, Link, LinkKind
from hil.controller.devices.ssh.address import is_ssh_address
from hil.errors import BoardError, BoardLost, UsageError

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell


class _SshLink:
    """Link with a shell and, if the board has an agent, a tunnel. Renewing replaces the shell and the tunnel."""

    def __init__(self, choice: BoardChoice, *, board: str) -> None:
        self._choice = choice
        self._board = board
        self._kept = contextlib.ExitStack()
        self.link = Link(AgentEndpoint(""), self._close, renew=self._renew)

    def _renew(self) -> AgentEndpoint:
        self._close()
        self.open()
        return self.link.target

    def _close(self) -> None:
        with contextlib.suppress(BoardError):
            self._kept.close()

    def _log_in(self) -> Shell:
        from hil.controller.devices.ssh.connect import open_shell

        config = self._choice.config
        shell = open_shell(self._choice.target, config.connection, board=self._board, base=config.path.parent)
        self._kept.callback(shell.close)
        self.link.shell = shell
        return shell

    def open(self) -> Link:
        """Log in for running shell commands."""
        self._log_in()
        self.link.connect = self._make_client
        return self.link

    def _make_client(self, board: str) -> BoardClient:
        from hil.controller.devices.agentless.client import CommandClient

        assert self.link.shell is not None
        return CommandClient(self.link.shell, self._choice, board=board)


class _AgentLink(_SshLink):
    """Link that installs an agent and connects to it. After a break, the link resumes interrupted uploads."""

    def open(self) -> Link:
        """Log in, start the agent, and open the tunnel to it."""
        import tenacity  # importing at module level would cost every command 3 ms

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(BoardLost),
            stop=tenacity.stop_after_attempt(3),
            wait=tenacity.wait_fixed(1.0),
            reraise=True,
        )
        return retrying(self._open)

    def _open(self) -> Link:
        from hil.controller.devices.deploy.ensure import AgentRecipe, ensure_agent
        from hil.controller.devices.deploy.packages import COMMAND_HINT, NoAgentHere
        from hil.controller.devices.ssh.tunnel import NoTunnel, open_any_tunnel

        choice, link = self._choice, self.link
        say, folder = choice.say, choice.config.connection.folder
        shell = self._log_in()
        try:
            recipe = AgentRecipe.of([choice.runtime or choice.config.runtime])
            place = ensure_agent(shell, recipe, folder=folder, board=self._board, say=say)
            tunnel = open_any_tunnel(shell, place.socket, place.python, say)
        except BaseException as error:
            self._kept.close()
            if isinstance(error, NoTunnel):
                raise NoAgentHere(error.message, board=self._board, hint=COMMAND_HINT) from error
            raise
        self._kept.callback(tunnel.close)
        link.target, link.log, link.build = AgentEndpoint(tunnel.address), tunnel.log, place.build
        link.pushed_bytes += place.pushed_bytes
        return link


def _connect_command(choice: BoardChoice) -> Link:
    if not is_ssh_address(choice.target):
        raise UsageError(
            f"running programs by command requires SSH, got {choice.target or 'no address'}",
            board=choice.name,
            hint="use --board USER@HOST, or set the address in [connection] of the config",
        )
    return _SshLink(choice, board=choice.name).open()


COMMAND_KIND = LinkKind(
    "command",
    _connect_command,
    serves=lambda choice: bool(choice.without_agent) or choice.config.command.kind == "command",
    capabilities=Capabilities(sessions=False, clock=False, python=False),
)
SSH_KIND = LinkKind("SSH", lambda choice: _AgentLink(choice, board=choice.target).open(), is_ssh_address)
