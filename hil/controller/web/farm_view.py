"""The farm as whoever made a request sees it: with their token, and what it may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from fastapi import Request
from fastapi.responses import HTMLResponse, Response

from hil.controller.web.farm_link import FarmLink
from hil.controller.web.site import is_saved, site_of
from hil.controller.web.visitors import Visitor
from hil.errors import AccessRefused, FarmUnreachable, UsageError

# A board's state -> the kind of outcome that it is coloured like.
STATE_KINDS = {
    "online": "pass",
    "suspect": "unfinished",
    "quarantined": "fail",
    "offline": "board",
    "draining": "error",
    "maintenance": "error",
}
# Fields of a form of ours.
_MOST_FIELDS = 20


@dataclass(frozen=True)
class FarmView:
    """A farm, and who looks at it."""

    link: FarmLink
    visitor: Visitor
    may_change: bool  # whether they have shown a token; what it may, the farm says

    def ask(self, what: str, **arguments: Any) -> Any:
        """Read something; errors are those of :meth:`.FarmLink.ask`."""
        return self.link.ask(what, self.visitor.token, **arguments)

    def do(self, action: str, **arguments: Any) -> Any:
        """Change something: the farm refuses what the token may not, with the errors of :meth:`.FarmLink.ask`."""
        if not self.may_change:
            raise AccessRefused("changing anything at the farm takes a token of its own", hint="open ?token=TOKEN")
        return self.link.do(action, self.visitor.token, **arguments)

    def may_cancel(self, job: Mapping[str, Any]) -> bool:
        """Whether a job can still be ended, and by whoever looks."""
        return self.may_change and not job["finished_at"] and self.visitor.may_cancel(job["user"])

    @property
    def may_hold(self) -> bool:
        """Whether whoever looks may hold boards back."""
        return self.may_change and self.visitor.may_hold


def view_of(request: Request) -> FarmView:
    """The farm as a request's sender sees it.

    Who shows a token of the farm's is its user. On loopback everybody else sees what the server's own token shows, and
    who has the server's token does what that may. On another address that token only looks.

    Raises:
        UsageError: the server was started without a farm.
    """
    link = site_of(request).farm
    if link is None:
        raise UsageError("these pages show no farm", hint="start them with hil web --farm local, or --farm HOST:PORT")
    visitor: Visitor | None = getattr(request.state, "visitor", None)
    if visitor is not None:
        return FarmView(link, visitor, not is_saved(request))
    return FarmView(link, link.own, getattr(request.state, "is_owner", False) and not is_saved(request))


def farm_page(request: Request, template: str, values: Mapping[str, Any]) -> Response:
    """A page that updates itself by what happens at the farm."""
    return site_of(request).page(request, template, address=_address(request), **values)


def is_update(request: Request) -> bool:
    """Whether only what changes by itself is asked for: charts are left out then."""
    return request.headers.get("hx-target", "") == "farm"


def away_page(request: Request, error: FarmUnreachable) -> HTMLResponse:
    """A page that says that the farm is away, and becomes what was asked for when it is back."""
    # htmx takes nothing but what went well into a page.
    status = 200 if "hx-request" in request.headers else 503
    values = {"message": error.message, "hint": error.hint, "address": _address(request)}
    return site_of(request).page(request, "farm_away.html", status=status, **values)


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form; UsageError where it is none of ours."""
    try:
        found = parse_qs((await request.body()).decode(), max_num_fields=_MOST_FIELDS)
    except ValueError as error:
        raise UsageError("this is no form of these pages") from error
    return {name: values[-1] for name, values in found.items()}


def _address(request: Request) -> str:
    return request.url.path + (f"?{request.url.query}" if request.url.query else "")
