"""Who may do what at a gateway: the token of each call, one table of roles, and the audit of what was refused."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hil import errors
from hil.controller.farm.messages import Principal, Role
from hil.controller.farm.store import access as tokens
from hil.controller.farm.store.database import Database, DatabaseAway

_LOG = logging.getLogger("hil.farm.gateway")

# Call, or call and what it is asked for -> the least role. What is not here nobody may do.
NEEDED: Mapping[str, Role] = {
    "Farm.Submit": Role.SUBMITTER,
    "Farm.Ask": Role.VIEWER,
    "Farm.Ask jobs": Role.VIEWER,
    "Farm.Ask job": Role.VIEWER,
    "Farm.Ask result": Role.VIEWER,
    "Farm.Ask logs": Role.VIEWER,
    "Farm.Ask boards": Role.VIEWER,
    "Farm.Ask events": Role.VIEWER,
    "Farm.Ask stats": Role.VIEWER,
    "Farm.Ask audit": Role.ADMIN,
    "Farm.Ask tokens": Role.ADMIN,
    "Farm.Do": Role.VIEWER,  # it depends on what
    "Farm.Do cancel": Role.SUBMITTER,
    "Farm.Do priority": Role.SUBMITTER,
    "Farm.Do drain": Role.ADMIN,
    "Farm.Do resume": Role.ADMIN,
    "Farm.Do forget": Role.ADMIN,
    "Farm.Do token": Role.ADMIN,
    "Farm.Do revoke": Role.ADMIN,
    "Farm.Do gc": Role.ADMIN,
    "Farm.Follow": Role.VIEWER,
    "Farm.Lease": Role.SUBMITTER,
    "Farm.Dial": Role.SUBMITTER,
    "Hosts.Attend": Role.HOST,
    "Hosts.Report": Role.HOST,
    "Hosts.Accept": Role.HOST,
    "Artifacts.Lacks": Role.SUBMITTER,
    "Artifacts.Upload": Role.SUBMITTER,
    "Artifacts.Download": Role.VIEWER,
}
# A token that another gateway revoked is good here for so long at most.
_TRUST_S = 2.0
_MOST_KNOWN, _LONGEST_TOKEN = 10_000, 200
# Nobody may fill the audit and the log with refusals: the same one again is counted, and told with the next after so
# long. Of so many different ones at a time no more are told.
_TOLD_S, _MOST_REFUSALS = 60.0, 1000


class Unauthenticated(errors.AccessRefused):
    """The farm asks for a token that is good."""


class Access:
    """Checks who calls.

    Args:
        db: where the tokens are.
    """

    def __init__(self, db: Database) -> None:
        self._db = db
        self._known: dict[str, tuple[float, Principal | None]] = {}
        # (user, call, peer) -> when it was told last, and how often it came since.
        self._refusals: dict[tuple[str, str, str], tuple[float, int]] = {}

    async def bearer(self, context: Any) -> Principal:
        """Who makes a call.

        Raises:
            Unauthenticated: nobody that we know of.
        """
        given = next((value for key, value in context.invocation_metadata() or () if key == "authorization"), "")
        scheme, _, token = str(given).partition(" ")
        who = await self._bearer_of(token.strip()) if scheme.lower() == "bearer" and token else None
        if who is None:
            raise Unauthenticated("the token is not good, or no more" if given else "no token was given")
        return replace(who, peer=peer_of(context))

    async def refused(self, who: Principal, action: str, reason: str) -> None:
        """Write down that somebody was not let. The same once more is only counted for a while."""
        now, key = time.monotonic(), (who.user, action, _machine(who.peer))
        told, count = self._refusals.get(key, (-_TOLD_S, 0))
        if now - told < _TOLD_S:
            self._refusals[key] = (told, count + 1)
            return
        if len(self._refusals) >= _MOST_REFUSALS:
            self._refusals = {one: seen for one, seen in self._refusals.items() if now - seen[0] < _TOLD_S}
            if len(self._refusals) >= _MOST_REFUSALS:
                return
        self._refusals[key] = (now, 0)
        detail = {"reason": reason, **({"times_before": count} if count else {})}
        _LOG.warning("refused", extra={"user": who.user, "peer": who.peer, "action": action, **detail})
        with contextlib.suppress(DatabaseAway):
            async with self._db.transaction() as tx:
                await tokens.note_audit(tx, who, action, "", False, detail)

    def forget(self) -> None:
        """Ask the database again for every token: one was revoked. What it is being asked just now counts no more."""
        self._known = {}

    async def _bearer_of(self, token: str) -> Principal | None:
        if len(token) > _LONGEST_TOKEN:
            return None
        known = self._known
        asked, who = known.get(token, (0.0, None))
        if asked and time.monotonic() - asked < _TRUST_S:
            return who
        async with self._db.transaction() as tx:
            who = await tokens.principal_of(tx, token)
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[token] = (time.monotonic(), who)
        return who


def admit(who: Principal, call: str, what: str | None = None) -> None:
    """Check that somebody may make a call, or ask it for something.

    Raises:
        AccessRefused: the role is too small.
        UsageError: there is no such thing to ask for.
    """
    action = call if what is None else f"{call} {what}"
    needed = NEEDED.get(action)
    if needed is None:
        known = [name.partition(" ")[2] for name in NEEDED if name.startswith(f"{call} ")]
        hint = f"{errors.did_you_mean(str(what), known)}it knows {', '.join(known)}"
        raise errors.UsageError(f"the farm knows no {str(what)[:50]!r}", hint=hint)
    if not who.role.covers(needed):
        raise errors.AccessRefused(
            f"{who.user} may not do that ({action}): it takes the role {needed.value}, not {who.role.value}",
            hint="an admin can do it, or make a token of that role: hil farm token add",
        )


def nobody(context: Any) -> Principal:
    """A caller without a token that is good, for the audit."""
    return Principal(user="", role=Role.VIEWER, peer=peer_of(context))


def _machine(peer: str) -> str:
    """A peer without its port."""
    return peer.rpartition(":")[0]


def peer_of(context: Any) -> str:
    """Where a call comes from."""
    return str(context.peer() or "")[:200]
