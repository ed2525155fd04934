"""Farm boards: list, state and reason, leases, jobs, use."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse, Response

from hil.controller.farm import selector
from hil.controller.farm.timeline import find_lease_periods
from hil.controller.records.pages.farm import BoardDocument, BoardsDocument
from hil.controller.web.pages.farm.charts import SPANS, Chart, check_span, make_empty_chart, make_use_chart
from hil.controller.web.pages.farm.view import (
    STATE_KINDS,
    FarmView,
    is_update,
    parse_form,
    render_away_page,
    render_farm_page,
    view_of,
)
from hil.controller.web.site import get_site
from hil.controller.web.text.documents import describe
from hil.controller.web.text.requests import number_of
from hil.errors import AccessRefused, FarmUnreachable, UsageError

router = APIRouter()
_EVENTS = 200
_CONFIRMED_ACTIONS = ("off", "cycle")


@router.get("/boards")
def boards(request: Request) -> Response:
    """List all boards, or the boards that match a selector."""
    farm, hours = view_of(request), check_span(number_of(request, "hours", 24))
    text = request.query_params.get("select", "")
    wanted = selector.parse(text)
    try:
        every = farm.ask("boards")
        chart = make_empty_chart(hours) if is_update(request) else use_of(farm, [one.name for one in every], hours)
    except FarmUnreachable as error:
        return render_away_page(request, error)
    found = [one for one in every if wanted.matches(one.labels)]
    chart = chart.select_lines([one.name for one in found])
    return render_farm_page(
        request, "boards.html", {**_list_common_values(farm), "boards": found, "select": text, "chart": chart}
    )


@router.get("/board")
def board(request: Request) -> Response:
    """Show a board with events, leases, jobs and use."""
    farm, hours = view_of(request), check_span(number_of(request, "hours", 24))
    name = request.query_params.get("name", "")
    try:
        found = next((one for one in farm.ask("boards") if one.name == name), None)
        if found is None:
            raise UsageError(f"board {name[:100]!r} not found on the farm", hint="see the list of boards")
        events = farm.link.past.events(farm.ask, name)[-5 * _EVENTS :]
        chart = make_empty_chart(hours) if is_update(request) else use_of(farm, [name], hours, board=name)
    except FarmUnreachable as error:
        return render_away_page(request, error)
    had = sorted(find_lease_periods(events), key=lambda one: one.lease, reverse=True)[:_EVENTS]
    values = {"board": found, "events": events[: -_EVENTS - 1 : -1], "stays": had}
    values |= {"shows_console": bool(request.query_params.get("console")), "wanted": request.query_params.get("q", "")}
    return render_farm_page(request, "board.html", {**_list_common_values(farm), **values, "chart": chart})


def use_of(farm: FarmView, boards: list[str], hours: int, board: str = "") -> Chart:
    """Return the use of boards over a time span. With ``board``, more events of that board are read."""

    def make() -> Chart:
        return make_use_chart(*farm.link.past.list_lease_periods(farm.ask, board), boards, hours)

    return farm.link.get_recent(f"use {hours} {board}", make)


def _list_common_values(farm: FarmView) -> dict[str, Any]:
    return {"farm": farm, "kinds": STATE_KINDS, "spans": SPANS}


@router.post("/board/drain")
async def drain(request: Request) -> Response:
    """Drain a board: running jobs may end, and no new jobs start."""
    form = await parse_form(request)
    return await _change_board(request, form, "drain", reason=form.get("reason", "") or "drained from the web page")


@router.post("/board/resume")
async def resume(request: Request) -> Response:
    """Return a board to service."""
    return await _change_board(request, await parse_form(request), "resume")


@router.post("/board/power")
async def power(request: Request) -> Response:
    """Switch a board's power. The host does it later, and the events report the end.

    The user must confirm an action that ends the programs on the board.
    """
    form = await parse_form(request)
    name, action = form.get("name", ""), form.get("action", "")
    if action in _CONFIRMED_ACTIONS and form.get("confirmed") != "yes":
        return await run_in_threadpool(_render_confirmation, request, name, action)
    await run_in_threadpool(view_of(request).do, "power", name=name, switch=action, detach=True)
    return RedirectResponse(f"/board?{urlencode({'name': name})}", 303)


def _render_confirmation(request: Request, name: str, action: str) -> Response:
    farm = view_of(request)
    found = next((one for one in farm.ask("boards") if one.name == name), None)
    if found is None:
        raise UsageError(f"board {name[:100]!r} not found on the farm", hint="see the list of boards")
    if not farm.may_switch(found):
        raise AccessRefused(f"the power of board {name} cannot be switched by {farm.visitor.user} now")
    values = {"farm": farm, "board": found, "action": action}
    return get_site(request).render_page(request, "power_confirm.html", **values)


async def _change_board(request: Request, form: dict[str, str], action: str, **arguments: str) -> Response:
    await run_in_threadpool(view_of(request).do, action, name=form.get("name", ""), **arguments)
    return RedirectResponse("/boards", 303)


# URL parameters by path.
PARAMETERS = {
    "/boards": ("hours", "select"),
    "/board": ("name", "hours", "console", "q"),
}

# JSON documents by path and template.
DOCUMENTS = {
    "/boards": {"boards.html": describe(BoardsDocument, use="chart")},
    "/board": {"board.html": describe(BoardDocument, leases="stays", use="chart")},
}
