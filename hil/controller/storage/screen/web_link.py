"""Links of stored results in the `hil web` of HIL_WEB_URL."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlencode, urlsplit

VARIABLE = "HIL_WEB_URL"


def make_web_link(folder: Path, case: str = "", *, parts: int = 1) -> str:
    """Return the URL of a stored session, or of a case; "" if HIL_WEB_URL is not set or is no http URL.

    hil does not know which directories the server has. The server finds the session by the end of its path.

    Args:
        folder: directory of the session.
        case: ID of the case; "" for the session.
        parts: number of directories that identify the session.
    """
    try:
        base = urlsplit(os.environ.get(VARIABLE, "").strip())
    except ValueError:
        return ""
    if base.scheme not in ("http", "https") or not base.netloc:
        return ""
    # Omit the query, which may contain a token.
    place = f"{base.scheme}://{base.netloc.rpartition('@')[2]}{base.path.rstrip('/')}"
    session = {"id": "/".join(folder.absolute().parts[-parts:])}
    # A file name may contain bytes that are no text.
    query = urlencode({**session, "case": case} if case else session, errors="replace")
    return f"{place}/{'case' if case else 'session'}?{query}"
