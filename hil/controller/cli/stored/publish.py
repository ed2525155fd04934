"""`hil publish`: send a stored session to a `hil web`."""

from __future__ import annotations

import click

from hil.controller.cli.commands import ProjectOption, make_command, read_project_runs
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import Bars, answer, print_message
from hil.controller.cli.usage.candidates import complete_runs


@make_command(epilog="Example: hil publish latest --to http://localhost:8790")
@click.argument("session", metavar="RUN", shell_complete=complete_runs)
@click.option(
    "--to",
    "address",
    required=True,
    cls=ProjectOption,
    key="web_url",
    metavar="URL",
    help="Address that `hil web` prints (default: web_url in hil.toml).",
)
@click.option("--token", default="", metavar="TEXT", envvar="HIL_WEB_TOKEN", help="Token of the server.")
@click.option("--as", "name", default="", metavar="NAME", help="Name of the session on the server.")
@click.option("--no-tensors", is_flag=True, help="Exclude .npy and .npz files.")
@click.option("--plain-http", is_flag=True, help="Send the token unencrypted to a remote machine.")
@json_option
def publish(
    session: str, address: str, token: str, name: str, no_tensors: bool, plain_http: bool, as_json: bool
) -> None:
    """Send a stored session to a `hil web` server.

    RUN is a run, suite, bench, bisection, study, trace or matrix: its directory, its name or start of a name in
    hil-runs or hil-suites, or `latest`. hil sends only files that the server lacks. After Ctrl-C, the same command
    continues. The server shows the session when all files have arrived.
    """
    from hil.controller.storage.session_folders import find_session_folder, list_roots
    from hil.controller.web.publish.publisher import Publisher, read_folder
    from hil.controller.web.readers import RECORDS

    with Publisher(address, token, plain_http=plain_http) as server:
        folder = read_folder(
            find_session_folder(session, list_roots(read_project_runs()), RECORDS), name, tensors=not no_tensors
        )
        for one in folder.left_out:
            print_message(f"left out: {one}")
        with Bars(as_json, ("spinner", "{task.description}", "bar", "{task.percentage:.0f} %", "time"), 32) as bars:
            task = bars.add(f"sending {folder.parcel.id}", folder.parcel.size)
            found = server.publish(folder, lambda done, total: bars.update(task, completed=done, total=total))
    sent = f"{found.sent_files} of {found.files} files sent, {found.sent_bytes / 1e6:.3g} MB"
    answer(as_json, found, found.url, sent if found.new else "already published")
