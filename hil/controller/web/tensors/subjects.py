"""Tensors that a request selects: those of a stored case, or two files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import Request

from hil.controller.web.index import sessions
from hil.controller.web.session.records import read_detail
from hil.controller.web.site import get_site
from hil.controller.web.tensors.query import TensorQuery
from hil.controller.web.tensors.tensors import TensorSide, TensorSubject, UnknownDtype, find_kept_tensors, open_tensor
from hil.controller.web.text.names import escape_name
from hil.errors import UsageError


def find_subjects(
    request: Request, query: TensorQuery
) -> tuple[sessions.IndexedSession | None, Any, list[TensorSubject]]:
    """Return the session, the case and the tensors. For `hil web diff`, return only the two files."""
    if not query.id:
        pair = getattr(request.app.state, "pair", None)
        if pair is None:
            raise UsageError(
                "session ID required", hint="follow a link on a case page, or run hil web diff A B for two files"
            )
        return None, None, [make_pair_subject(*pair)]
    with get_site(request).reader.open_snapshot() as database:
        session = sessions.resolve_session(database, query.id, query.root)
        case = sessions.find_case(database, session, query.case)
    kept = find_kept_tensors(session, read_detail(session, case))
    if not kept.subjects:
        raise UsageError(kept.why, hint=kept.command)
    return session, case, list(kept.subjects)


def make_pair_subject(a: Path, b: Path) -> TensorSubject:
    """Return the subject for two files. The second is the reference."""
    titles = [escape_name(one) for one in ((a.name, b.name) if a.name != b.name else (str(a), str(b)))]
    return TensorSubject(
        "files",
        escape_name(a.name),
        [TensorSide(title, path) for title, path in zip(titles, (a, b), strict=True)],
        escape_name(str(b)),
    )


def check_pair(a: Path, b: Path) -> None:
    """Raise UsageError if a file is not a tensor. For raw bytes, the page asks for the dtype."""
    for side in make_pair_subject(a, b).sides:
        try:
            open_tensor(side, "")
        except UnknownDtype as unknown:
            if not unknown.choices:
                raise
