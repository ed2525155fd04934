"""Farm view with a request's token and permissions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from fastapi import Request
from fastapi.responses import Response

from hil.controller.farm.messages import Role
from hil.controller.records.lab.farm import FarmBoard, FarmJob
from hil.controller.web.access.visitors import Visitor
from hil.controller.web.farm.link import FarmLink
from hil.controller.web.site import get_site
from hil.controller.web.text.documents import is_json
from hil.controller.web.text.requests import is_saved
from hil.core.cancellation import check_cancelled
from hil.errors import AccessRefused, FarmUnreachable, UsageError

# Board state -> kind of outcome. Pages show both in the same color.
STATE_KINDS = {
    "online": "pass",
    "suspect": "unfinished",
    "quarantined": "fail",
    "offline": "board",
    "draining": "error",
    "maintenance": "error",
}
# Maximum fields in a form.
_MAX_FIELDS = 20


@dataclass(frozen=True)
class FarmView:
    """Farm and the visitor who views it."""

    link: FarmLink
    visitor: Visitor
    may_change: bool  # True if the request has a token. The farm checks the token's permissions.

    def ask(self, what: str, **arguments: Any) -> Any:
        """Query the farm. Raises the errors of :meth:`.FarmLink.ask`."""
        check_cancelled()
        return self.link.ask(what, self.visitor.token, **arguments)

    def do(self, action: str, **arguments: Any) -> Any:
        """Change something at the farm. The farm checks permissions. Raises the errors of :meth:`.FarmLink.ask`."""
        if not self.may_change:
            raise AccessRefused("farm token required for changes", hint="open ?token=TOKEN")
        return self.link.do(action, self.visitor.token, **arguments)

    def may_cancel(self, job: FarmJob) -> bool:
        """Return True if the job is active and the visitor may cancel it."""
        return self.may_change and not job.finished_at and self.visitor.may_cancel(job.user)

    @property
    def may_hold(self) -> bool:
        """True if the visitor may take boards out of service."""
        return self.may_change and self.visitor.may_hold

    @property
    def may_read_console(self) -> bool:
        """True if the visitor may read the consoles of boards, which can show secrets of jobs."""
        return self.may_change and self.visitor.role.covers(Role.SUBMITTER)

    def may_switch(self, board: FarmBoard) -> bool:
        """Return True if the visitor may switch the board's power now. The host must be able to."""
        is_free = not board.job or board.user == self.visitor.user or self.visitor.role is Role.ADMIN
        return self.may_change and self.visitor.may_switch_power and bool(board.power) and is_free


def view_of(request: Request) -> FarmView:
    """Return the farm as a request's sender sees it.

    A request with a farm token acts as that user. A request with the server's token reads with the server's farm token.
    On loopback, such a request can also change the farm with the server's farm token.

    Raises:
        UsageError: the server runs without a farm.
        AccessRefused: the request has no token.
    """
    link = get_site(request).farm
    if link is None:
        raise UsageError("not connected to a farm", hint="start hil web --farm local, or --farm HOST:PORT")
    visitor: Visitor | None = getattr(request.state, "visitor", None)
    if visitor is not None:
        return FarmView(link, visitor, not is_saved(request))
    if not getattr(request.state, "has_token", False):
        raise AccessRefused("token required for farm pages", hint="open the URL printed by hil web")
    return FarmView(link, link.own, getattr(request.state, "is_owner", False) and not is_saved(request))


def render_farm_page(request: Request, template: str, values: Mapping[str, Any]) -> Response:
    """Render a page that updates after farm events."""
    return get_site(request).render_page(request, template, address=_request_path(request), **values)


def is_update(request: Request) -> bool:
    """Return True if the request only updates the live part of a page, without charts."""
    return request.headers.get("hx-target", "") == "farm"


def render_away_page(request: Request, error: FarmUnreachable) -> Response:
    """Render a page for an unreachable farm. The page reloads after the farm is back. For JSON, raise the error."""
    if is_json(request):
        raise error
    # htmx ignores responses with an error status.
    status = 200 if "hx-request" in request.headers else 503
    values = {"message": error.message, "hint": error.hint, "address": _request_path(request)}
    return get_site(request).render_page(request, "farm_away.html", status=status, **values)


async def parse_form(request: Request) -> dict[str, str]:
    """Parse a form's fields. Raises UsageError if the form is invalid."""
    try:
        found = parse_qs((await request.body()).decode(), max_num_fields=_MAX_FIELDS)
    except ValueError as error:
        raise UsageError("invalid form data") from error
    return {name: values[-1] for name, values in found.items()}


def _request_path(request: Request) -> str:
    return request.url.path + (f"?{request.url.query}" if request.url.query else "")
