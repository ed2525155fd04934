from __future__ import annotations

import pytest

from hil.controller.farm.desk.reading import _ANSWERS
from hil.controller.farm.gateway.access import NEEDED, admit
from hil.controller.farm.gateway.deeds import Deeds
from hil.controller.farm.stubs import SERVICES, methods
from hil.controller.farm.words import Bearer, Role
from hil.errors import AccessRefused, UsageError


def test_table_names_every_call_and_everything_that_can_be_asked_or_done() -> None:
    calls = {f"{service}.{name}" for service in SERVICES for name, *_ in methods(service)}
    asked = {f"Farm.Ask {what}" for what in _ANSWERS}
    done = {f"Farm.Do {action}" for action in Deeds(None)._known}
    assert set(NEEDED) == calls | asked | done


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("action", NEEDED)
def test_each_role_may_all_that_smaller_ones_may(role: Role, action: str) -> None:
    who = Bearer("anna", role)
    call, _, what = action.partition(" ")
    if list(Role).index(role) >= list(Role).index(NEEDED[action]):
        admit(who, call, what or None)
    else:
        with pytest.raises(AccessRefused, match=NEEDED[action].value):
            admit(who, call, what or None)


@pytest.mark.parametrize("role", Role)
def test_what_is_not_in_the_table_nobody_may(role: Role) -> None:
    with pytest.raises(UsageError) as unknown:
        admit(Bearer("anna", role), "Farm.Ask", "job5")
    assert "'job'" in unknown.value.hint
