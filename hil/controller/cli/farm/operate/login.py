"""`hil farm login` and `hil farm logout`: use a farm with an account of a login provider."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer, print_message
from hil.controller.records.commands.farm import FarmLogin, FarmLogout
from hil.controller.records.lab.farm import FarmUser
from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.controller.farm.oidc.device_login import DeviceCode

_SCOPE = "openid profile offline_access"


@make_command(epilog="Example: hil farm login --issuer https://login.example.com/realms/lab --client-id hil")
@click.option("--issuer", envvar="HIL_FARM_ISSUER", metavar="URL", help="Login provider [env: HIL_FARM_ISSUER].")
@click.option(
    "--client-id", envvar="HIL_FARM_CLIENT_ID", metavar="ID", help="Client of the farm [env: HIL_FARM_CLIENT_ID]."
)
@click.option("--scope", default=_SCOPE, show_default=True, metavar="TEXT", help="Requested scopes.")
@click.option("--audience", default="", metavar="TEXT", help="Audience of the access token, if the provider needs it.")
@click.option("--id-token", is_flag=True, help="Send the ID token to the farm instead of the access token.")
@json_option
def login(issuer: str | None, client_id: str | None, scope: str, audience: str, id_token: bool, as_json: bool) -> None:
    """Log in to the farm in HIL_FARM with a code that you confirm in a browser.

    hil stores the tokens in a private file and refreshes them. All hil commands then use this login, unless
    HIL_FARM_TOKEN is set. Without options, hil uses the provider of the previous login.
    """
    from hil.controller.farm.client.client import FarmClient
    from hil.controller.farm.oidc.device_login import log_in
    from hil.controller.farm.paths import choose_farm_address, get_login_key, open_login_store

    farm, store = get_login_key(), open_login_store()
    before = None if issuer and client_id else store.find(farm)
    issuer, client_id = issuer or (before.issuer if before else ""), client_id or (before.client_id if before else "")
    if not issuer or not client_id:
        raise UsageError(
            "missing login provider",
            hint="hil farm login --issuer URL --client-id ID, with the values of the farm's admin",
        )
    uses_id_token = id_token or (before is not None and before.uses_id_token)
    made = log_in(issuer, client_id, _show_code, scope=scope, audience=audience, uses_id_token=uses_id_token)
    with FarmClient(choose_farm_address(token=made.token)) as client:
        user: FarmUser = client.ask("me")
    store.save(farm, made)
    document = FarmLogin(farm=farm, issuer=issuer, user=user.user, role=user.role, groups=user.groups)
    answer(as_json, document, f"logged in to {farm} as {user.user} with role {user.role}")


def _show_code(code: DeviceCode) -> None:
    print_message(f"open {code.complete_url or code.url} and confirm the code {code.user_code}")


@make_command(epilog="Example: hil farm logout")
@json_option
def logout(as_json: bool) -> None:
    """Delete the stored login at the farm in HIL_FARM."""
    from hil.controller.farm.paths import get_login_key, open_login_store

    farm = get_login_key()
    removed = open_login_store().remove(farm)
    answer(
        as_json, FarmLogout(farm=farm, removed=removed), f"logged out of {farm}" if removed else f"no login at {farm}"
    )
