"""Power switches with an HTTP interface: sockets and power strips with a built-in web server."""

from __future__ import annotations

import base64
import contextlib
import http.client
import urllib.error
import urllib.parse
import urllib.request

from hil.core.board_config import Http
from hil.errors import BoardError

# Maximum number of response bytes to show.
_SHOWN = 400


def request(hook: Http, timeout: float, action: str, board: str) -> str:
    """Send the HTTP request of a hook and return the response. Raises BoardError on failure."""
    data = hook.body.encode() if hook.body or hook.method in ("POST", "PUT", "PATCH") else None
    headers = dict(hook.headers)
    shown = ""
    try:
        parts = urllib.parse.urlsplit(hook.url)
        login, _, place = parts.netloc.rpartition("@")
        # Errors are stored and forwarded, so they must not contain passwords or tokens.
        shown = f"{parts.scheme}://{place}{parts.path}"
        if login:
            headers["Authorization"] = f"Basic {base64.b64encode(urllib.parse.unquote_to_bytes(login)).decode()}"
        url = parts._replace(netloc=place).geturl()
        asked = urllib.request.Request(url, data, headers, method=hook.method)
        with urllib.request.urlopen(asked, timeout=timeout) as reply:
            return str(reply.read(_SHOWN).decode(errors="replace"))
    except (OSError, ValueError, OverflowError, http.client.HTTPException) as error:
        detail = ""
        if isinstance(error, urllib.error.HTTPError):
            with error, contextlib.suppress(OSError, ValueError, OverflowError, http.client.HTTPException):
                detail = error.read(_SHOWN).decode(errors="replace")
        hint = f"send {hook.method} {shown} manually"
        raise BoardError(f"the {action} request failed: {error}", board=board, hint=hint, detail=detail) from error
