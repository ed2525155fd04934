"""What changed, as it changes: server-sent events that make pages update in place."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, StreamingResponse

from hil.controller.web.live import told_of
from hil.controller.web.sessions import find_session
from hil.controller.web.sides import session_of
from hil.controller.web.site import number_of, site_of
from hil.errors import UsageError

router = APIRouter()
_MOST_ASKED = 50


@router.get("/events")
async def events(request: Request) -> StreamingResponse:
    """An event ``changed`` whenever the index did, with how far it is."""
    progress = site_of(request).progress
    return told_of("changed", request, lambda: progress.generation, lambda: False)


@router.get("/api/there")
def there(request: Request) -> JSONResponse:
    """Whether the sessions of a page are there still: ``?id=...&root=...``, and ``?s=REFERENCE``, which repeats.

    ``gone`` says what is not; it is empty while the folders are read for the first time, when nobody knows.
    """
    site, query = site_of(request), request.query_params
    gone = []
    if site.progress.first_done:
        with site.reader.reading() as database:
            try:
                if query.get("id"):
                    find_session(database, query["id"], number_of(request, "root"))
                for one in query.getlist("s")[:_MOST_ASKED]:
                    session_of(database, one)
            except UsageError as error:
                gone.append(error.message)
    return JSONResponse({"gone": "".join(gone)})
