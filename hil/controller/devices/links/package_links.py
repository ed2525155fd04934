"""Links and boards from packages, with guarded calls and checked results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from hil.controller.devices.board_choice import PROVIDERS, BoardChoice, is_provider_address, use_device
from hil.controller.devices.board_client import BoardClient, Invocation, ProfilePass, ProgramHandle
from hil.controller.devices.links.link import BoardLoan, BoardProvider, Link, LinkKind
from hil.controller.storage.sources.packages import describe_entry_point, load
from hil.core.board_config import BoardConfig
from hil.core.field_types import is_a
from hil.core.guarded import GuardedObject, find_package, guard_plugin
from hil.core.installed import list_entry_points
from hil.core.text import TextSink
from hil.errors import BoardError, BoardUnreachable, ProtocolBroken, StageError, UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def connect_by_package(point: EntryPoint, choice: BoardChoice) -> Link:
    """Open the link to a board through a function of a package.

    Raises:
        UsageError: The function cannot be loaded, or it refuses the address.
        BoardError: The function fails or does not return a link.
    """
    connect = load(point)
    return open_guarded(describe_entry_point(point), lambda: connect(choice.target, choice.config), choice.say)


def open_guarded(who: str, connect: Callable[[], Any], say: TextSink) -> Link:
    """Open a link and guard the callbacks. Raises UsageError and BoardError, as :func:`connect_by_package`."""
    with guard_plugin(who, BoardUnreachable, BoardError, UsageError):
        link: Link = connect()
        is_a(Link)(link)
    how = (ProtocolBroken, BoardError, UsageError)

    def close() -> None:
        try:
            with guard_plugin(f"closing {who}", *how):
                link.close()
        except (BoardError, UsageError) as error:
            say(error.message)

    def read_text(read: Callable[[], str]) -> str:
        with contextlib.suppress(BoardError, UsageError), guard_plugin(who, *how):
            return str(read())
        return ""

    def renew() -> Any:
        assert link.renew is not None
        with guard_plugin(who, BoardUnreachable, BoardError, UsageError):
            return link.renew()

    def connect_client(board: str) -> BoardClient:
        assert link.connect is not None
        with guard_plugin(who, BoardUnreachable, BoardError, UsageError):
            made = link.connect(board)
        allowed = (BoardError, StageError, UsageError)
        return cast(BoardClient, GuardedObject(made, who, ProtocolBroken, *allowed, checks=_CLIENT))

    return replace(
        link,
        close=close,
        log=lambda: read_text(link.log),
        over=lambda: read_text(link.over),
        renew=link.renew and renew,
        connect=link.connect and connect_client,
    )


def find_provider(address: str) -> tuple[BoardProvider, str]:
    """Return the provider for an address, and the selector in it.

    Raises:
        UsageError: No provider is registered for the prefix, or the provider cannot be loaded.
        BoardUnreachable: The provider fails.
    """
    prefix, _, selector = address.partition(":")
    for point in list_entry_points(PROVIDERS):
        if point.name == prefix:
            return _load_provider(point), selector.strip()
    raise UsageError(f"board provider not found for {address}")


def _load_provider(point: EntryPoint) -> BoardProvider:
    who = describe_entry_point(point)
    make = load(point)
    with guard_plugin(who, BoardUnreachable, BoardError, UsageError):
        provider: BoardProvider = make()
        if not all(callable(getattr(provider, name, None)) for name in ("connect", "order")):
            raise TypeError("not a hil.plugins.BoardProvider: connect or order is missing")
    return _GuardedProvider(provider, who) if find_package(point.group, point.name) else provider


class _GuardedProvider:
    """Provider of a package, guarded together with links and loans."""

    def __init__(self, provider: BoardProvider, who: str) -> None:
        self._provider, self._who = provider, who

    def connect(self, selector: str, *, runtime: str, purpose: str, wait_s: float, say: TextSink) -> Link:
        how: dict[str, Any] = {"runtime": runtime, "purpose": purpose, "wait_s": wait_s, "say": say}
        return open_guarded(self._who, lambda: self._provider.connect(selector, **how), say)

    def order(self, selector: str, purpose: str) -> BoardLoan:
        with guard_plugin(self._who, BoardUnreachable, BoardError, UsageError):
            loan = self._provider.order(selector, purpose)
        return cast(BoardLoan, GuardedObject(loan, self._who, BoardUnreachable, BoardError, UsageError, checks=_LOAN))


def _connect(choice: BoardChoice) -> Link:
    provider, selector = find_provider(choice.target)
    link = provider.connect(
        selector, runtime=choice.runtime, purpose=choice.purpose, wait_s=choice.wait_s, say=choice.say
    )
    if link.config is not None:
        link.config = use_device(replace(choice, config=link.config), *choice.used_device).config
    return link


LENT_KIND = LinkKind("lent board", _connect, is_provider_address)


def _check_info(info: Any) -> None:
    is_a(Mapping)(info)
    if not isinstance(info.get("machine"), Mapping):
        raise TypeError("the client's info must contain 'machine', a mapping")
    runtimes = info.get("runtimes", ())
    if not isinstance(runtimes, list | tuple) or not all(
        isinstance(one, Mapping) and "name" in one for one in runtimes
    ):
        raise TypeError("the client's info must contain 'runtimes', a list of mappings with a name")


_CLIENT: Mapping[str, Callable[[Any], None]] = {
    "info": _check_info,
    "payload_bytes_sent": is_a(int),
    "notice": is_a(str),
    "find_command": is_a(str),
    "open_session": is_a(int),
    "pings": is_a(list, tuple),
    "tools": is_a(Mapping),
    "missing": is_a(Mapping),
    "load_program": is_a(ProgramHandle),
    "invoke": is_a(Invocation),
    "profile": is_a(ProfilePass),
    "logs": is_a(list, tuple),
}
_LOAN: Mapping[str, Callable[[Any], None]] = {
    "name": is_a(str),
    "config": is_a(BoardConfig),
    "wait": is_a(bool),
    "queue_text": is_a(str),
    "ended": is_a(str),
}
