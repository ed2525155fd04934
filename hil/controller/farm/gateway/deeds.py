"""What users and admins change with ``Do``, each deed with its row in the audit."""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections.abc import Mapping
from typing import Any

from hil.controller.farm.desk import access as desk
from hil.controller.farm.desk import boards, cleaning, forgetting, submissions
from hil.controller.farm.desk.database import Tx
from hil.controller.farm.gateway.calls import Call
from hil.controller.farm.gateway.parts import Parts
from hil.controller.farm.words import Priority, Role
from hil.errors import UsageError

_LOG = logging.getLogger("hil.farm.gateway")
_MOST_DAYS, _DAY_S = 3660, 86400.0


class Deeds:
    """The actions by name; what each takes is checked here, who may do it in :mod:`.access`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._known = {
            "cancel": self._cancel,
            "priority": self._priority,
            "drain": self._drain,
            "resume": self._resume,
            "forget": self._forget,
            "token": self._token,
            "revoke": self._revoke,
            "gc": self._gc,
        }

    async def do(self, action: str, arguments: Mapping[str, Any], call: Call) -> Any:
        """Do it; returns what there is to tell, as JSON."""
        parts = self._parts
        async with parts.db.transaction() as tx:
            answer = await self._known[action](tx, arguments, call)
            said = {key: value for key, value in arguments.items() if key not in ("name", "user")}
            thing = str(arguments.get("name") or arguments.get("user") or "")
            await desk.note_audit(tx, call.who, f"{call.name} {action}", thing, True, said)
        parts.dispatch.poke()
        if action == "revoke":
            parts.access.forget()
        _LOG.info("done", extra={"action": action, "object": thing, "user": call.who.user})
        return answer

    async def _cancel(self, tx: Tx, arguments: Mapping[str, Any], call: Call) -> Any:
        name = _text(arguments, "name")
        return {"cancelled": await submissions.cancel(tx, self._parts.engine, call.who, name, self._parts.terms)}

    async def _priority(self, tx: Tx, arguments: Mapping[str, Any], call: Call) -> Any:
        try:
            priority = Priority(_text(arguments, "priority"))
        except ValueError as error:
            raise UsageError(f"a priority is {', '.join(one.value for one in Priority)}") from error
        return {"jobs": await submissions.prioritise(tx, call.who, _text(arguments, "name"), priority)}

    async def _drain(self, tx: Tx, arguments: Mapping[str, Any], call: Call) -> Any:
        await boards.drain(tx, call.who, _text(arguments, "name"), _text(arguments, "reason", ""))
        return {}

    async def _resume(self, tx: Tx, arguments: Mapping[str, Any], call: Call) -> Any:
        await boards.resume(tx, self._parts.engine, call.who, _text(arguments, "name"), self._parts.terms)
        return {}

    async def _forget(self, tx: Tx, arguments: Mapping[str, Any], call: Call) -> Any:
        return {"ended": await forgetting.forget(tx, call.who, _text(arguments, "name"), self._parts.terms)}

    async def _token(self, tx: Tx, arguments: Mapping[str, Any], call: Call) -> Any:
        """A new token: ``user``, ``role``, ``project``, ``note``, ``expires_s`` (0: never)."""
        try:
            role = Role(_text(arguments, "role"))
        except ValueError as error:
            roles = ", ".join(one.value for one in Role)
            raise UsageError(f"there is no role {str(arguments['role'])[:50]!r}", hint=f"one of {roles}") from error
        seconds = _number(arguments, "expires_s", 0, _MOST_DAYS * _DAY_S)
        until = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=seconds) if seconds else None
        project, note = _text(arguments, "project", ""), _text(arguments, "note", "")
        return {"token": await desk.add_token(tx, _text(arguments, "user"), role, project, note, until)}

    async def _revoke(self, tx: Tx, arguments: Mapping[str, Any], call: Call) -> Any:
        """The token ``id`` is good no more."""
        number = arguments.get("id")
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 1 << 62:
            raise UsageError(f"id must be a token's number, not {str(number)[:50]!r}", hint="hil farm token list")
        return {"user": await desk.revoke(tx, number)}

    async def _gc(self, tx: Tx, arguments: Mapping[str, Any], call: Call) -> Any:
        """Delete what is old: ``dry_run`` only counts, ``days`` is how long things are kept."""
        parts, dry_run = self._parts, arguments.get("dry_run", False)
        days = _number(arguments, "days", parts.terms.keep_days, _MOST_DAYS)
        if not isinstance(dry_run, bool):
            raise UsageError("dry_run must be true or false")

        async def delete(digests: list[str]) -> None:
            for digest in digests:
                await asyncio.to_thread(parts.store.delete, digest)

        if not dry_run:
            # In a transaction of its own, since nobody else can do anything until it is over; this one waits meanwhile.
            await tx.execute("set local idle_in_transaction_session_timeout = '1min'")
            async with parts.db.transaction() as own:
                await forgetting.forget_absent(own, days * _DAY_S, parts.terms)
        cleaned = await cleaning.gc(tx, days * _DAY_S, delete, dry_run=dry_run)
        if not dry_run:
            await asyncio.to_thread(parts.store.sweep, _DAY_S, time.time())
        return {"counts": cleaned.counts, "bytes": cleaned.bytes}


def _text(arguments: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = arguments.get(name, default)
    if not isinstance(value, str) or len(value) > 1000 or (default is None and not value):
        raise UsageError(f"{name} must be a text of at most 1000 characters" + ("" if value else ", and is missing"))
    return value


def _number(arguments: Mapping[str, Any], name: str, default: float, most: float) -> float:
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise UsageError(f"{name} must be a number from 0 to {most:g}, not {str(value)[:50]!r}")
    return value
