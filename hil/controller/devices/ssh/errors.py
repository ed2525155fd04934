"""Errors of an SSH login, common to both clients."""

from hil.errors import BoardRefused, BoardUnreachable


class NoSuchHost(BoardUnreachable):
    """The board's host name does not resolve."""


class ProxyFailed(BoardUnreachable):
    """The ProxyCommand of the ssh config did not reach the board."""


class TurnedAway(BoardUnreachable):
    """The server refused the connection or closed it at once, as a restarting server does."""


class LoginSlow(BoardUnreachable):
    """The server or a jump host was silent for longer than ssh's timeout, for example while it checked the login."""


class HostKeyRefused(BoardRefused):
    """The host key is unknown, changed or revoked."""


class LoginRefused(BoardRefused):
    """The board responds but refuses the login."""
