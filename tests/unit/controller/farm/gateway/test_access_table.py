from __future__ import annotations

import pytest

from hil.controller.farm.gateway.calls import NEEDED, NOTHING, check_admission
from hil.controller.farm.gateway.services.farm_service import AdminActions
from hil.controller.farm.messages import Principal, Role
from hil.controller.farm.rpc import SERVICES, iter_methods
from hil.controller.farm.store.queries import _ANSWERS
from hil.errors import AccessRefused, UsageError


def test_access_table_covers_all_calls_queries_and_actions() -> None:
    calls = {f"{service}.{name}" for service in SERVICES for name, *_ in iter_methods(service)}
    asked = {f"Farm.Ask {what}" for what in _ANSWERS}
    actions = AdminActions(None)
    done = {f"Farm.Do {action}" for action in (*actions._known, *actions._long)}
    consoles = {"Farm.Dial console"}  # writing to a console, besides reading it
    assert set(NEEDED) == calls | asked | done | consoles


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("action", NEEDED)
def test_role_has_permissions_of_lower_roles(role: Role, action: str) -> None:
    who = Principal("anna", role)
    call, _, what = action.partition(" ")
    if list(Role).index(role) >= list(Role).index(NEEDED[action]):
        check_admission(who, call, what or None)
    else:
        with pytest.raises(AccessRefused, match=NEEDED[action].value):
            check_admission(who, call, what or None)


@pytest.mark.parametrize("role", Role)
def test_admit_rejects_calls_missing_from_table(role: Role) -> None:
    with pytest.raises(UsageError) as unknown:
        check_admission(Principal("anna", role), "Farm.Ask", "job5")
    assert "'job'" in unknown.value.hint


@pytest.mark.parametrize("call", ["Farm.Ask", "Farm.Do"])
def test_request_of_newer_client_is_explained(call: str) -> None:
    with pytest.raises(UsageError, match="the client is newer than this gateway"):
        check_admission(Principal("anna", Role.ADMIN), call, NOTHING)
