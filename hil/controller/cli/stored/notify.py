"""`hil notify`: send messages about the causes of new failures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from hil.controller.cli.commands import ProjectOption, make_command
from hil.controller.cli.options import FILE, json_option, result_folders_option
from hil.controller.cli.screen import answer
from hil.controller.records.decisions.notification import NotifyReport
from hil.core.install_hints import make_install_command
from hil.errors import UsageError


@make_command(epilog="Example: hil notify --runs hil-suites --github lab/models --digest")
@result_folders_option
@click.option(
    "--since",
    default="",
    metavar="BASELINE",
    help="night:YYYY-MM-DD, branch:NAME or label:NAME (default: the night before the newest).",
)
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["json", "slack"]),
    default="json",
    show_default=True,
    help="Format for the webhook in HIL_NOTIFY_URL.",
)
@click.option(
    "--github",
    default="",
    cls=ProjectOption,
    key="notify_github",
    metavar="OWNER/REPO",
    help="Open issues on GitHub instead, with GITHUB_TOKEN (default: notify_github in hil.toml).",
)
@click.option("--issue", type=click.IntRange(1), metavar="N", help="With --github: comment on this issue.")
@click.option("--commit", default="", metavar="SHA", help="With --github: set the status of this commit.")
@click.option("--digest", is_flag=True, help="Send one message with all new causes (default: one for each).")
@click.option(
    "--web-url",
    default="",
    cls=ProjectOption,
    key="web_url",
    envvar="HIL_WEB_URL",
    metavar="URL",
    help="Address of hil web for links (default: web_url in hil.toml).",
)
@click.option(
    "--triage", type=FILE, metavar="FILE", help="Triage of failures (default: hil-triage.json, as for hil web)."
)
@click.option(
    "--state", type=FILE, metavar="FILE", help="File with the announced causes (default: hil-notify.json in --runs)."
)
@click.option("--dry-run", is_flag=True, help="Print the messages, and send nothing.")
@json_option
def notify(
    runs: tuple[Path, ...],
    since: str,
    format_name: str,
    github: str,
    issue: int | None,
    commit: str,
    digest: bool,
    web_url: str,
    triage: Path | None,
    state: Path | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Send messages about new failures and slower cases, grouped by cause as on the home page of hil web.

    hil sends each cause once to each receiver. Causes whose cases are all known failures by triage are left out. The
    receiver is the webhook in HIL_NOTIFY_URL, signed with HIL_NOTIFY_SECRET, or a repository on GitHub.
    """
    try:
        from hil.controller.web.announce.announcing import NAME, Announcer
        from hil.controller.web.announce.news import MAX_CASES, read_news
        from hil.controller.web.announce.receivers import Receiver, make_github_receiver, make_webhook_receiver
    except ModuleNotFoundError as error:
        raise UsageError(f"hil notify requires {error.name}", hint=make_install_command("web")) from error

    from hil.controller.records.base import Record
    from hil.controller.web.announce.receivers import Body
    from hil.controller.workloads.triage.triage_file import choose_triage_file, read_triage

    roots = runs or (Path(),)
    for root in roots:
        if not root.is_dir():
            raise UsageError(f"{root} is not a directory", hint="specify the directory with stored runs")
    if not github and (issue or commit):
        raise UsageError("--issue and --commit need --github", hint="add --github OWNER/REPO")
    receiver: Receiver
    if github:
        receiver = make_github_receiver(github, issue or 0, commit, os.environ, dry_run=dry_run)
    else:
        receiver = make_webhook_receiver(format_name, os.environ, dry_run=dry_run)
    known = read_triage(triage or choose_triage_file(roots[0])[0])
    news = read_news(roots, since, known, web_url)

    def show(body: Body) -> None:
        text = json.dumps(body.to_json() if isinstance(body, Record) else body, indent=1, ensure_ascii=False)
        # With --json, stdout contains only the report.
        click.echo(text, err=as_json)

    announcer = Announcer(receiver, state or roots[0] / NAME)
    report = announcer.announce(news, is_digest=digest, dry_run=dry_run, show=show)
    if report.is_cut:
        text = f"warning: hil read only the newest {MAX_CASES:,} changed cases: select a newer baseline with --since"
        click.echo(text, err=True)
    return answer(as_json, report, show=lambda: _print_report(report))


def _print_report(report: NotifyReport) -> None:
    verb = "would send" if report.dry_run else "sent"
    for title in report.sent:
        click.echo(f"{verb} to {report.receiver or 'a webhook (HIL_NOTIFY_URL is not set)'}: {title}")
    if not report.sent:
        click.echo("nothing new to send")
    if report.announced:
        click.echo(f"already sent: {report.announced}")
    if report.known:
        click.echo(f"known failures: {report.known}")
