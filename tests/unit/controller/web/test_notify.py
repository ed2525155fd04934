"""Test `hil notify`: each cause is sent once, in the format of the receiver."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.nights import DAY, FIRST_NIGHT, write_nights
from support.schemas import check_document
from support.web import write_suite
from support.webhooks import WebhookReceiver, receive_webhooks

from hil.controller.cli.main import cli
from hil.controller.notify.delivery import sign_body
from hil.controller.web.announce import news
from hil.controller.web.index.folders import index_path
from hil.controller.web.index.index import IndexWriter
from hil.controller.web.index.indexer import Indexer
from hil.controller.workloads.triage.entries import make_entry
from hil.controller.workloads.triage.triage_file import NAME, write_triage
from hil.errors import DeliveryFailed, UsageError

SINCE = "night:2023-11-18"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nights")
    write_nights(folder, 10)
    return folder


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with receive_webhooks() as one:
        yield one


@pytest.fixture
def runs(tmp_path: Path, nights: Path, monkeypatch: pytest.MonkeyPatch, receiver: WebhookReceiver) -> Path:
    shutil.copytree(nights, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("HIL_NOTIFY_SECRET", "GITHUB_TOKEN", "GITHUB_API_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HIL_NOTIFY_URL", receiver.url)
    return tmp_path / "runs"


def notify(*arguments: str) -> Result:
    since = () if "--since" in arguments else ("--since", SINCE)
    return CliRunner().invoke(cli, ["notify", "--runs", "runs", *since, *arguments])


def send(*arguments: str) -> dict[str, Any]:
    """Run the command and return its report."""
    done = notify("--json", *arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    report: dict[str, Any] = json.loads(done.stdout)
    check_document(report, "notify")
    return report


def test_each_cause_is_sent_once(runs: Path, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_NOTIFY_SECRET", "key")
    report = send("--web-url", "https://lab.example/")
    assert len(report["sent"]) == len(receiver.messages) == 3 and report["announced"] == 0
    for message in receiver.messages:
        check_document(message.document, "notify message")
        assert message.headers["x-hil-event"] == "cause"
        assert message.headers["x-hil-signature-256"] == sign_body("key", message.body)
        [cause] = message.document["causes"]
        assert cause["url"].startswith("https://lab.example/cause?since=night") and cause["names"]
    kinds = {message.document["causes"][0]["kind"] for message in receiver.messages}
    assert kinds == {"board", "layer", "tools"}
    again = send()
    assert (again["sent"], again["announced"], len(receiver.messages)) == ([], 3, 3)
    check_document(json.loads((runs / "hil-notify.json").read_text()), "notify state")
    # A new cause in a later night is the only message.
    case = {"id": "new", "outcome": "PASS", "board": "rpi5"}
    for number, outcome in ((10, "PASS"), (11, "FAIL")):
        changed = [{**case, "outcome": outcome}]
        write_suite(runs, f"other-{number}", changed, suite="other", started=FIRST_NIGHT + number * 86400)
    assert len(send()["sent"]) == 1 and receiver.messages[-1].document["causes"][0]["names"] == ["new"]


def test_limit_of_changed_cases_is_reported(
    runs: Path, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not send("--dry-run")["is_cut"] and "newest" not in notify("--dry-run").stderr
    monkeypatch.setattr(news, "MAX_CASES", 1)
    assert send("--dry-run")["is_cut"]
    assert "warning: hil read only the newest" in notify("--dry-run").stderr


def test_digest_is_one_message_per_receiver(
    runs: Path, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = send("--digest")
    [message] = receiver.messages
    assert report["sent"] == ["3 new causes since night 2023-11-18"] and len(message.document["causes"]) == 3
    # Another receiver has not received the causes.
    slack = send("--digest", "--format", "slack", "--web-url", "https://lab.example")
    body = receiver.messages[-1].document
    assert slack["announced"] == 0 and body["text"] == "hil: 3 new causes since night 2023-11-18"
    text = json.dumps(body["blocks"])
    assert len(body["blocks"]) == 4 and "<https://lab.example/cause?" in text and "digits_layer_Conv_1" in text
    monkeypatch.setenv("HIL_NOTIFY_URL", f"{receiver.url}other")
    assert send("--digest")["announced"] == 0 and len(receiver.messages) == 3


def test_link_encodes_baseline(runs: Path, receiver: WebhookReceiver) -> None:
    case = {"id": "new", "outcome": "PASS"}
    write_suite(runs, "old", [case], suite="other", started=FIRST_NIGHT, origin={"branch": "a&verdict=pass#x"})
    failing = [{**case, "outcome": "FAIL"}]
    write_suite(runs, "new", failing, suite="other", started=FIRST_NIGHT + 86400)
    send("--digest", "--since", "branch:a&verdict=pass#x", "--web-url", "https://lab.example")
    assert receiver.messages[-1].document["url"] == "https://lab.example/?since=branch%3Aa%26verdict%3Dpass%23x"


def test_directory_without_sessions_sets_no_status(
    runs: Path, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_API_URL", receiver.url)
    monkeypatch.setenv("GITHUB_TOKEN", "secret")
    (runs.parent / "none").mkdir()
    arguments = ["notify", "--runs", "none", "--github", "lab/models", "--commit", COMMIT]
    done = CliRunner().invoke(cli, arguments)
    assert isinstance(done.exception, UsageError) and "no sessions of suites" in done.exception.message
    assert receiver.messages == []


def test_notify_waits_for_running_hil_web(
    runs: Path, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    send()
    case = {"id": "new", "outcome": "PASS"}
    write_suite(runs, "old", [case], suite="other", started=FIRST_NIGHT + 10 * DAY)
    write_suite(runs, "new", [{**case, "outcome": "FAIL"}], suite="other", started=FIRST_NIGHT + 11 * DAY)
    (runs / "foreign").mkdir()
    (runs / "foreign" / "run.json").write_text("{}")  # a file of another tool, which is never in the index
    with IndexWriter(index_path([runs.resolve()])) as writer:
        server = Indexer(writer, [runs.resolve()])
        paused = []

        def pause(seconds: float) -> None:
            paused.append(seconds)
            server.scan()  # hil web reads the sessions while hil notify waits

        monkeypatch.setattr("hil.controller.web.announce.news.time.sleep", pause)
        sent = send()["sent"]
    assert len(sent) == 1 and paused


def test_dry_run_prints_and_sends_nothing(runs: Path, receiver: WebhookReceiver) -> None:
    done = notify("--dry-run", "--digest", "--format", "slack")
    assert done.exit_code == 0 and '"blocks"' in done.stdout and "would send to http://" in done.stdout
    assert receiver.messages == [] and not (runs / "hil-notify.json").exists()


def test_dry_run_without_url_names_variable(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HIL_NOTIFY_URL")
    done = notify("--dry-run", "--digest")
    assert "would send to a webhook (HIL_NOTIFY_URL is not set): " in done.stdout


def test_github_opens_issue_comments_and_sets_status(
    runs: Path, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_API_URL", receiver.url)
    monkeypatch.setenv("GITHUB_TOKEN", "secret")
    send("--github", "lab/models")
    issue = receiver.messages[0]
    assert issue.path.endswith("/repos/lab/models/issues") and issue.headers["authorization"] == "Bearer secret"
    assert issue.document["title"].startswith("hil: ") and "| cause | cases |" in issue.document["body"]
    assert len(receiver.messages) == 3
    send("--github", "lab/models", "--issue", "7", "--digest")
    comment = receiver.messages[-1]
    assert comment.path.endswith("/issues/7/comments") and list(comment.document) == ["body"]
    announced = (runs / "hil-notify.json").read_bytes()
    for _ in range(2):  # a status replaces the one before
        send("--github", "lab/models", "--commit", COMMIT)
    status = receiver.messages[-1]
    assert status.path.endswith(f"/statuses/{COMMIT}") and len(receiver.messages) == 6
    # Statuses would displace the causes of other receivers.
    assert (runs / "hil-notify.json").read_bytes() == announced
    assert (status.document["state"], status.document["context"]) == ("failure", "hil/night")
    done = CliRunner().invoke(cli, ["notify", "--runs", "runs", "--github", "lab/models", "--commit", COMMIT])
    assert done.exit_code == 0 and receiver.messages[-1].document["state"] == "success"


def test_known_failures_are_not_sent(runs: Path, receiver: WebhookReceiver) -> None:
    write_triage(
        runs / NAME, [make_entry(case="*Softmax*", state="known"), make_entry(case="*Conv*", state="new", owner="ada")]
    )
    report = send()
    assert (len(report["sent"]), report["known"]) == (2, 1)
    owners = [message.document["causes"][0]["owners"] for message in receiver.messages]
    assert ["ada"] in owners


def test_failed_delivery_keeps_earlier_messages(runs: Path, receiver: WebhookReceiver) -> None:
    receiver.respond(200, 403)
    done = notify()
    assert isinstance(done.exception, DeliveryFailed) and receiver.url not in done.exception.message
    assert send()["announced"] == 1 and len(receiver.messages) == 4


def test_malicious_names_stay_plain_text(tmp_path: Path, runs: Path, receiver: WebhookReceiver) -> None:
    name = "<!channel> **[x](http://evil)**|` @team"
    for number, outcome in ((20, "PASS"), (21, "FAIL")):
        case = {"id": name, "model": name, "outcome": outcome}
        write_suite(runs, f"evil-{number}", [case], suite="evil", started=FIRST_NIGHT + number * 86400)
    send("--format", "slack")
    text = "".join(json.dumps(message.document) for message in receiver.messages)
    assert "&lt;!channel&gt;" in text and "<!channel>" not in text
    printed = notify("--github", "lab/models", "--dry-run").stdout
    [body] = [line for line in printed.splitlines() if '"body"' in line and "evil" in line]
    assert r"\\[x\\]" in body and "[x](http" not in body and "@team" not in body


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--github", "lab"], "invalid --github"),
        (["--github", "lab/models", "--commit", "abc"], "invalid --commit"),
        (["--github", "lab/models", "--commit", COMMIT, "--issue", "3"], "exclusive"),
        (["--github", "lab/models"], "--github needs a token"),
        (["--issue", "3"], "need --github"),
        (["--since", "tag:x"], "invalid baseline"),
        (["--since", "branch:none"], "nothing to compare"),
        (["--runs", "none"], "not a directory"),
        (["--state", "none/state.json"], "directory none not found"),
    ],
)
def test_invalid_options_are_rejected(runs: Path, receiver: WebhookReceiver, arguments: list[str], text: str) -> None:
    done = notify(*arguments)
    assert isinstance(done.exception, UsageError) and text in done.exception.message and done.exception.hint
    assert receiver.messages == []


def test_missing_or_invalid_url_is_rejected_without_secret(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_NOTIFY_URL", "ftp://host/secret")
    done = notify()
    assert isinstance(done.exception, UsageError) and "secret" not in done.exception.message
    monkeypatch.delenv("HIL_NOTIFY_URL")
    done = notify()
    assert isinstance(done.exception, UsageError) and "HIL_NOTIFY_URL" in done.exception.hint


def test_damaged_state_is_reported(runs: Path, receiver: WebhookReceiver) -> None:
    (runs / "hil-notify.json").write_text('{"schema": 1, "announced": [{}]}')
    done = notify()
    assert isinstance(done.exception, UsageError) and "hil-notify.json" in done.exception.message
    (runs / "hil-notify.json").unlink()
    (runs / "hil-notify.json").symlink_to(runs / "elsewhere.json")
    assert "symbolic link" in str(notify().exception) and receiver.messages == []
