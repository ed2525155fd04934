from __future__ import annotations

import pytest

from hil.controller.farm.gateway.calls import NEEDED, admit
from hil.controller.farm.gateway.farm_service import AdminActions
from hil.controller.farm.messages import Principal, Role
from hil.controller.farm.rpc import SERVICES, methods
from hil.controller.farm.store.queries import _ANSWERS
from hil.errors import AccessRefused, UsageError


def test_table_names_every_call_and_everything_that_can_be_asked_or_done() -> None:
    calls = {f"{service}.{name}" for service in SERVICES for name, *_ in methods(service)}
    asked = {f"Farm.Ask {what}" for what in _ANSWERS}
    done = {f"Farm.Do {action}" for action in AdminActions(None)._known}
    assert set(NEEDED) == calls | asked | done


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("action", NEEDED)
def test_each_role_may_all_that_smaller_ones_may(role: Role, action: str) -> None:
    who = Principal("anna", role)
    call, _, what = action.partition(" ")
    if list(Role).index(role) >= list(Role).index(NEEDED[action]):
        admit(who, call, what or None)
    else:
        with pytest.raises(AccessRefused, match=NEEDED[action].value):
            admit(who, call, what or None)


@pytest.mark.parametrize("role", Role)
def test_what_is_not_in_the_table_nobody_may(role: Role) -> None:
    with pytest.raises(UsageError) as unknown:
        admit(Principal("anna", role), "Farm.Ask", "job5")
    assert "'job'" in unknown.value.hint
