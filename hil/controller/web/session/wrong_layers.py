"""First wrong layers of models, from stored bisections."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from hil.controller.storage.outcomes import classify_outcome
from hil.controller.web.index.index import SEPARATOR

# Maximum bisections to search.
_BISECTIONS = 200


@dataclass(frozen=True)
class BisectedLayer:
    """First wrong layer of a stored bisection."""

    created: float
    name: str
    op: str
    outcome: str

    def explains(self, op: str, outcome: str, created: float) -> bool:
        """Return True if a failure is of this layer or of the whole model, and began before the bisection.

        Args:
            op: operator of the case; "" for a whole model.
            outcome: outcome of the case without expectations.
            created: time of the session.
        """
        return (
            self.created >= created
            and op in ("", self.op)
            and classify_outcome(outcome) == classify_outcome(self.outcome)
        )


def find_wrong_layers(database: sqlite3.Connection, models: set[str] | None = None) -> dict[str, list[BisectedLayer]]:
    """Return the first wrong layer of each stored bisection per model, newest first.

    Args:
        models: names of models; None selects all.
    """
    found: dict[str, list[BisectedLayer]] = {}
    rows = database.execute(
        "select key, models, created from sessions where kind = 'bisect' and verdict in ('fail', 'error')"
        " order by created desc limit ?",
        (_BISECTIONS,),
    ).fetchall()
    for key, names, created in rows if models != set() else ():
        named = {one for one in names.split(SEPARATOR) if one}
        for model in named if models is None else named & models:
            layer = database.execute(
                "select n.word, p.word, o.word from cases join words n on n.key = name join words o on o.key = outcome"
                " join words p on p.key = op where session = ? and p.word != 'model'"
                " and o.word not in ('', 'PASS', 'SKIP') order by number limit 1",
                (key,),
            ).fetchone()
            if layer is not None:
                found.setdefault(model, []).append(BisectedLayer(created or 0.0, *layer))
    return found
