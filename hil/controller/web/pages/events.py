"""Server-sent events for index changes, which update pages in place."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, StreamingResponse

from hil.controller.web.index.sessions import resolve_session
from hil.controller.web.live import stream_counts
from hil.controller.web.session.sides import get_session
from hil.controller.web.site import get_site
from hil.controller.web.text.requests import SESSION, number_of
from hil.errors import UsageError

router = APIRouter()
_MAX_ASKED = 50


@router.get("/events")
async def events(request: Request) -> StreamingResponse:
    """Send a ``changed`` event with the generation after every index change."""
    progress = get_site(request).progress
    return stream_counts("changed", request, lambda: progress.generation, lambda: False)


@router.get("/api/there")
def there(request: Request) -> JSONResponse:
    """Check that the sessions of a page still exist: ``?id=...&root=...``, or repeated ``?s=REFERENCE``.

    The field ``gone`` contains an error message for a missing session. The field is empty during the first scan,
    because hil does not know all sessions yet.
    """
    site, query = get_site(request), request.query_params
    gone = []
    if site.progress.first_done:
        with site.reader.open_snapshot() as database:
            try:
                if query.get("id"):
                    resolve_session(database, query["id"], number_of(request, "root"))
                for one in query.getlist("s")[:_MAX_ASKED]:
                    get_session(database, one)
            except UsageError as error:
                gone.append(error.message)
    return JSONResponse({"gone": "".join(gone)})


# URL parameters by path.
PARAMETERS = {
    "/api/there": (*SESSION, "s"),
}
