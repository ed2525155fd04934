"""`hil publish`: send a stored session to a `hil web`."""

from __future__ import annotations

from dataclasses import asdict

import click

from hil.controller.cli.commands import command
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import Bars, answer, say


@command(epilog="Example: hil publish latest --to http://localhost:8790")
@click.argument("session", metavar="RUN")
@click.option("--to", "address", required=True, metavar="URL", help="A `hil web`, by the address that it prints.")
@click.option("--token", default="", metavar="TEXT", envvar="HIL_WEB_TOKEN", help="That server's token.")
@click.option("--as", "name", default="", metavar="NAME", help="What the session is called there.")
@click.option("--no-tensors", is_flag=True, help="Leave .npy and .npz files out.")
@click.option("--plain-http", is_flag=True, help="Send the token unencrypted to another machine.")
@json_option
def publish(
    session: str, address: str, token: str, name: str, no_tensors: bool, plain_http: bool, as_json: bool
) -> None:
    """Send a stored session to a `hil web`, whose pages then show it.

    RUN is a run, suite, bench, bisection, study, trace or matrix: its folder, its name in hil-runs or hil-suites,
    the beginning of that, or `latest`. Only what the server lacks is sent; after Ctrl-C the same command goes on from
    there. The session appears as a whole.
    """
    from hil.controller.web.publisher import Server, read_folder, session_folder

    with Server(address, token, plain_http=plain_http) as server:
        folder = read_folder(session_folder(session), name, tensors=not no_tensors)
        for one in folder.left_out:
            say(f"left out: {one}")
        with Bars(as_json, ("spinner", "{task.description}", "bar", "{task.percentage:.0f} %", "time"), 32) as bars:
            task = bars.add(f"sending {folder.parcel.id}", folder.parcel.size)
            found = server.publish(folder, lambda done, total: bars.update(task, completed=done, total=total))
    sent = f"{found.sent_files} of {found.files} files sent, {found.sent_bytes / 1e6:.3g} MB"
    answer(as_json, asdict(found), found.url, sent if found.new else "it was there already")
