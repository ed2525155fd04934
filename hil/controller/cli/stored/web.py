"""`hil web`: serve pages of stored results, or compare two files in a browser."""

from __future__ import annotations

import secrets
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hil.controller.cli.commands import group
from hil.controller.cli.history_place import make_history_option
from hil.controller.cli.options import FILE, FOLDER, result_folders_option
from hil.controller.cli.screen import print_message
from hil.core.install_hints import make_install_command
from hil.errors import HilError, UsageError

if TYPE_CHECKING:
    from hil.controller.pipeline.settings.history_settings import HistorySettings
    from hil.controller.storage.history.place import HistoryPlace


@group(invoke_without_command=True, epilog="Example: hil web --runs hil-runs --runs hil-suites")
@result_folders_option
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option(
    "--port",
    default=8790,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 is any free port.",
)
@click.option(
    "--token",
    metavar="TEXT",
    envvar="HIL_WEB_TOKEN",
    help="Token required to change anything, and to view pages from another machine.",
)
@click.option(
    "--farm",
    default="",
    metavar="URL|local",
    help="Also show a farm: HOST:PORT (with HIL_FARM_TOKEN, HIL_FARM_CA), or this machine's farm.",
)
@click.option(
    "--published", type=FOLDER, metavar="DIR", help="Directory for published sessions (default: RUNS/published)."
)
@click.option("--published-gb", default=64.0, show_default=True, metavar="GB", help="Size limit of published sessions.")
@click.option(
    "--triage",
    type=FILE,
    metavar="FILE",
    help="Triage of failures (default: hil-triage.json in the first --runs, or else in the working directory).",
)
@click.option("--tls-cert", type=FILE, metavar="PEM", help="Certificate for HTTPS. A replaced file needs no restart.")
@click.option("--tls-key", type=FILE, metavar="PEM", help="Private key of the certificate.")
@make_history_option("[history] in hil.toml of --runs, or hil-runs/history")
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
    triage: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    chosen: HistorySettings | None,
) -> None:
    """Show stored results in a browser until Ctrl-C: sessions, comparisons, history, gates, tensors, graphs, traces.

    Sends no data to other servers, and pages load nothing from other servers. --farm adds boards and the queue. Users
    with the printed address then have all permissions of the farm token.
    """
    if context.invoked_subcommand:
        return
    try:
        from hil.controller.web.access.security import SHORTEST_TOKEN, AccessRules
        from hil.controller.web.publish.published import PUBLISHED, PublishedStore
        from hil.controller.web.server.server import serve
        from hil.core.loopback import is_loopback
    except ModuleNotFoundError as error:
        raise UsageError(f"hil web requires {error.name}", hint=make_install_command("web")) from error

    from hil.controller.farm.paths import choose_farm_address, get_farm_home, own_address
    from hil.controller.workloads.triage.triage_file import choose_triage_file
    from hil.protocol.certificates import TlsFiles
    from hil.protocol.listening import check_tls_files

    check_tls_files(cert=tls_cert, key=tls_key, ca_needs_cert=True)
    roots = runs or (Path(),)
    for root in roots:
        if not root.is_dir():
            raise UsageError(f"{root} is not a directory", hint="specify the directory with stored runs")
    if token is not None and not token.strip():
        raise UsageError(
            "empty --token: changes and publishing would be impossible",
            hint="create a token: python -c 'import secrets; print(secrets.token_urlsafe())' > token; without --token, "
            "pages on loopback are read-only",
        )
    token = (token or "").strip()  # strip spaces, because HTTP strips spaces around header values
    if not (token or farm or is_loopback(host)):
        raise UsageError(
            f"--host {host} requires a token: other machines can reach it", hint="use --token or HIL_WEB_TOKEN"
        )
    if token and not is_loopback(host) and len(token) < SHORTEST_TOKEN:
        raise UsageError(
            f"invalid --token: access from other machines requires at least {SHORTEST_TOKEN} characters",
            hint="create a token: python -c 'import secrets; print(secrets.token_urlsafe())'",
        )
    if not 0 <= published_gb < 1e9:
        raise UsageError(f"invalid --published-gb {published_gb}: expected a size from 0 to 1e9")
    store = PublishedStore((published or roots[0] / PUBLISHED).resolve(), int(published_gb * 1e9))
    made = secrets.token_urlsafe(24) if farm and not token and is_loopback(host) else ""

    def print_address(address: str) -> None:
        click.echo(f"{address}{f'?token={made}' if made else ''}\nStop with Ctrl-C.")

    where = own_address if farm == "local" else lambda: choose_farm_address(farm)
    name = str(get_farm_home()) if farm == "local" else farm
    if farm and farm != "local":
        where()  # report missing connection settings immediately
    access = AccessRules(host, token or made)
    if triage is None:
        triage, note = choose_triage_file(roots[0])
        if note:
            print_message(note)
    history = chosen.place if chosen else _find_farm_history(farm) or _find_history(roots)
    link = where if farm else None
    serve(
        roots,
        access,
        port,
        listening=print_address,
        farm=link,
        farm_name=name,
        published=store,
        history=history,
        triage=triage.absolute(),
        tls=TlsFiles(tls_cert.absolute(), tls_key.absolute()) if tls_cert and tls_key else None,
    )


def _find_farm_history(farm: str) -> HistoryPlace | None:
    """Return the history of this machine's farm, or None if the pages show another farm or the farm has no history."""
    if farm != "local":
        return None
    from hil.controller.farm.local.farm_history import find_farm_history

    try:
        return find_farm_history().place
    except UsageError:
        return None


def _find_history(roots: Sequence[Path]) -> HistoryPlace | None:
    """Return the first existing history of the served directories, or else the path that the first history would have.

    A history outside of the served directory needs trust. Without trust, hil reports the error and shows no history.
    """
    from hil.controller.pipeline.settings.project import find_history, find_project
    from hil.controller.storage.history import DEFAULT_PATH
    from hil.controller.storage.history.place import HistoryPlace

    found: list[HistoryPlace] = []
    for root in roots:
        try:
            if find_project(root):
                found.append(find_history(root).place)
                continue
            # The served directory may also be hil-runs.
            places = (root / DEFAULT_PATH, root / DEFAULT_PATH.name)
            found += [HistoryPlace(one) for one in places if one.resolve().is_relative_to(root.resolve())]
        except (HilError, OSError, RuntimeError) as error:
            print_message(f"hil: history not shown: {error}")
    return next((one for one in found if one.may_exist()), next(iter(found), None))


@web.command(epilog="Example: hil web diff actual.npy expected.npy")
@click.argument("a", type=FILE, metavar="A")
@click.argument("b", type=FILE, metavar="B")
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Port to listen on (default: any free port).")
@click.option(
    "--open/--no-browser", "opens", default=True, help="Open the page in a browser, or only print the address."
)
def diff(a: Path, b: Path, port: int, opens: bool) -> None:
    """Compare two .npy files by element in a browser until Ctrl-C; B is the reference.

    The page is only served locally. To view it from another machine: ssh -L PORT:127.0.0.1:PORT HOST, with this --port.
    """
    try:
        from hil.controller.web.server.server import serve_pair
    except ModuleNotFoundError as error:
        raise UsageError(f"hil web requires {error.name}", hint=make_install_command("web")) from error

    from hil.controller.analysis.profile.perfetto import has_screen

    def print_address(address: str) -> None:
        click.echo(f"{address}\nStop with Ctrl-C.")
        if opens and has_screen():
            # Some browsers block the terminal until they exit.
            threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()

    serve_pair(a, b, port, listening=print_address)
