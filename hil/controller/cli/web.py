"""`hil web`: pages of what is stored."""

from __future__ import annotations

import secrets
from pathlib import Path

import click

from hil.controller.cli.commands import group
from hil.controller.cli.options import FOLDER
from hil.controller.cli.web_diff import diff
from hil.errors import UsageError


@group(invoke_without_command=True, epilog="Example: hil web --runs hil-runs --runs hil-suites")
@click.option(
    "--runs", multiple=True, type=FOLDER, metavar="DIR", help="A folder of what is stored (default: .); repeats."
)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where to listen.")
@click.option("--port", default=8790, show_default=True, type=click.IntRange(0, 65535), help="0 is any that is free.")
@click.option(
    "--token",
    metavar="TEXT",
    envvar="HIL_WEB_TOKEN",
    help="What shows who may change things, and on other addresses than loopback who may look.",
)
@click.option(
    "--farm",
    default="",
    metavar="URL|local",
    help="Also a farm's boards, queue and results: HOST:PORT (HIL_FARM_TOKEN, HIL_FARM_CA), or this machine's own.",
)
@click.option(
    "--published", type=FOLDER, metavar="DIR", help="Where it is kept what hil publish sends (default: RUNS/published)."
)
@click.option("--published-gb", default=64.0, show_default=True, metavar="GB", help="What all of that may take.")
@click.pass_context
def web(
    context: click.Context,
    runs: tuple[Path, ...],
    host: str,
    port: int,
    token: str | None,
    farm: str,
    published: Path | None,
    published_gb: float,
) -> None:
    """Show what is stored in a browser: sessions, comparisons, history, tensors, graphs, traces. Ctrl-C ends it.

    Nothing is sent anywhere, and no page fetches anything from elsewhere. With --farm also boards and the queue:
    what its token may, whoever has the address that is printed may do there.
    """
    if context.invoked_subcommand:
        return
    try:
        from hil.controller.web.published import PUBLISHED, PublishedStore
        from hil.controller.web.security import SHORTEST_TOKEN, Access, is_loopback
        from hil.controller.web.server import serve
    except ModuleNotFoundError as error:
        raise UsageError(f"hil web needs {error.name}", hint="pip install 'hil[web]'") from error

    from hil.controller.farm.paths import farm_address, farm_home, own_address

    roots = runs or (Path(),)
    for root in roots:
        if not root.is_dir():
            raise UsageError(f"{root} is no folder", hint="name the folder that runs are stored in")
    if token is not None and not token.strip():
        raise UsageError(
            "the token is empty, so nobody could change or publish anything",
            hint="python -c 'import secrets; print(secrets.token_urlsafe())' > token makes one; without --token pages "
            "of loopback are read alone",
        )
    token = (token or "").strip()  # no header has a space around it
    if not (token or farm or is_loopback(host)):
        raise UsageError(f"{host} is reached from other machines: a token is needed", hint="--token, or HIL_WEB_TOKEN")
    if token and not is_loopback(host) and len(token) < SHORTEST_TOKEN:
        raise UsageError(
            f"a token that other machines may try has {SHORTEST_TOKEN} characters or more",
            hint="python -c 'import secrets; print(secrets.token_urlsafe())' makes one",
        )
    if not 0 <= published_gb < 1e9:
        raise UsageError(f"--published-gb {published_gb} is no size")
    store = PublishedStore((published or roots[0] / PUBLISHED).resolve(), int(published_gb * 1e9))
    made = secrets.token_urlsafe(24) if farm and not token and is_loopback(host) else ""

    def listening(address: str) -> None:
        click.echo(f"{address}{f'?token={made}' if made else ''}\nCtrl-C ends this.")

    where = own_address if farm == "local" else lambda: farm_address(farm)
    name = str(farm_home()) if farm == "local" else farm
    if farm and farm != "local":
        where()  # what is missing to call it is said now
    access = Access(host, token or made)
    serve(roots, access, port, listening=listening, farm=where if farm else None, farm_name=name, published=store)


web.add_command(diff)
