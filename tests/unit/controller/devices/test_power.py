"""Power and reset hooks with real programs, a real HTTP server, and a board that needs a certain hook."""

from __future__ import annotations

import base64
import contextlib
import http.server
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.waiting import eventually

from hil.controller.devices.power_control.power import recover, switch
from hil.controller.devices.ssh.errors import LoginSlow, NoSuchHost, ProxyFailed, TurnedAway
from hil.core.board_config import Command, Http, Power
from hil.core.board_parser import parse_power
from hil.errors import BoardBusy, BoardError, BoardLost, BoardUnreachable, UsageError


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def note(log: Path, *words: str) -> Command:
    """Return a hook that appends its words to a log, one per line."""
    return Command(
        (
            sys.executable,
            "-c",
            "import sys; open(sys.argv[1], 'a').write('\\n'.join(sys.argv[2:]) + '\\n')",
            str(log),
            *words,
        )
    )


class SwitchedSocket:
    """A power distribution unit with a web server."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str | None, bytes]] = []
        self.logins: list[str] = []
        self.status = 200
        unit = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if login := self.headers.get("Authorization"):
                    unit.logins.append(login)
                unit.requests.append((self.command, self.path, self.headers.get("X-Key"), body))
                self.send_response(unit.status)
                self.end_headers()
                self.wfile.write(b"relay says so")

            do_GET = do_PUT = do_POST  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def unit():
    made = SwitchedSocket()
    yield made
    made.close()


class Hanging:
    """A board that answers after its hook has run."""

    def __init__(self, log: Path, helps: str, error: type[BoardError] = BoardUnreachable) -> None:
        self.log, self.helps, self.error, self.tries = log, helps, error, 0

    def connect(self) -> str:
        self.tries += 1
        if self.log.exists() and self.helps in self.log.read_text().split():
            return "connected"
        raise self.error("no answer")


def hooks(log: Path, *actions: str, boot_s: float = 0.0) -> Power:
    return Power({action: note(log, action) for action in actions}, delay=0.0, boot_s=boot_s)


# ---- the table


def test_parse_power_reads_every_hook_kind():
    power = parse_power(
        {
            "reset": ["relay", "1 2"],
            "cycle": "labgrid-client -p 'my board' power cycle",
            "off": {"url": "http://pdu/3/off", "method": "PUT", "headers": {"X-Key": "k"}, "body": "b"},
            "boot_s": 30,
        },
        Path("a.toml"),
    )
    assert power.hooks["reset"] == Command(("relay", "1 2"))
    assert power.hooks["cycle"] == Command(("labgrid-client", "-p", "my board", "power", "cycle"))
    assert power.hooks["off"] == Http("http://pdu/3/off", "PUT", {"X-Key": "k"}, "b")
    assert power.boot_s == 30.0


def test_relative_program_resolves_beside_config(tmp_path):
    power = parse_power({"reset": ["./reset.sh", "./x"], "off": ["/usr/bin/off"], "on": "on"}, tmp_path / "a.toml")
    assert power.hooks["reset"] == Command((str(tmp_path / "reset.sh"), "./x"))
    assert (power.hooks["off"], power.hooks["on"]) == (Command(("/usr/bin/off",)), Command(("on",)))


def test_parse_power_accepts_labgrid_keys():
    power = parse_power({"cmd_on": "pdu --on 3", "cmd_off": "pdu --off 3", "delay": 5}, Path("a.toml"))
    assert power.hooks == {"on": Command(("pdu", "--on", "3")), "off": Command(("pdu", "--off", "3"))}
    assert power.delay == 5.0
    assert power.can("cycle")
    assert not power.can("reset")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"explode": ["x"]}, "unknown key 'explode'"),
        ({"hooks": ["x"]}, "unknown key 'hooks'"),
        ({"reset": []}, "must be a command"),
        ({"reset": ""}, "must be a command"),
        ({"reset": ["x", 1]}, "must be a command"),
        ({"reset": 3}, "must be a command"),
        ({"reset": "it's"}, "cannot parse the command"),
        ({"reset": {"url": "file:///etc/passwd"}}, "http://"),
        ({"reset": {"method": "GET"}}, "http://"),
        ({"reset": {"url": 3}}, "http://"),
        ({"reset": {"url": "http://x", "verify": False}}, "verify"),
        ({"reset": {"url": "http://x", "headers": "a: b"}}, "headers"),
        ({"reset": {"url": "http://x", "headers": {"a": 1}}}, "a table of strings"),
        ({"reset": {"url": "http://x", "body": 1}}, "must be text"),
        ({"on": ["x"], "cmd_on": "y"}, "twice"),
        ({"boot_s": "long"}, "seconds"),
        ({"boot_s": True}, "seconds"),
        ({"delay": -1}, "seconds"),
        ({"delay": float("nan")}, "seconds"),
        ({"boot_s": float("inf")}, "seconds"),
        ({"timeout_s": 10**400}, "seconds"),
        ({"reset": ["a\0b"]}, "contains a NUL"),
    ],
)
def test_parse_power_error_names_table(table, said):
    with pytest.raises(UsageError, match=r"^a\.toml: \[power\]") as caught:
        parse_power(table, Path("a.toml"))
    assert said in str(caught.value)


# ---- single actions


def test_command_receives_literal_arguments(log):
    power = Power({"reset": note(log, "$(touch x)", "a b; c", "*")})
    switch(power, "reset", board="b")
    assert log.read_text() == "$(touch x)\na b; c\n*\n"


def test_switch_returns_command_output():
    assert switch(Power({"reset": Command(("echo", "relay 3 is open"))}), "reset", board="b") == "relay 3 is open"


def test_failed_command_error_has_output_and_hint():
    power = Power({"reset": Command(("sh", "-c", "echo no such relay >&2; exit 3"))})
    with pytest.raises(BoardError, match="reset command failed with exit code 3") as caught:
        switch(power, "reset", board="b")
    assert caught.value.detail == "no such relay\n"
    assert "run it manually: sh -c 'echo no such relay >&2; exit 3'" in caught.value.hint


def test_missing_command_raises_usage_error():
    with pytest.raises(UsageError, match="cannot start"):
        switch(Power({"reset": Command(("/nowhere/relay",))}), "reset", board="b")


@pytest.mark.ci
def test_command_timeout_kills_children(log):
    script = f"sleep 600 & echo $! > {log}; wait"
    power = Power({"reset": Command(("sh", "-c", script))}, timeout_s=2.0)
    with pytest.raises(BoardError, match="timed out after 2 s"):
        switch(power, "reset", board="b")
    child = Path("/proc") / log.read_text().strip() / "stat"
    with contextlib.suppress(OSError):  # it is gone
        eventually(lambda: child.read_text().split()[2] == "Z")


def test_missing_hook_error_names_setting():
    with pytest.raises(UsageError, match="missing command for reset") as caught:
        switch(Power(), "reset", board="b")
    assert "[power] reset =" in caught.value.hint


def test_cycle_falls_back_to_off_and_on(log):
    switch(hooks(log, "on", "off"), "cycle", board="b")
    assert log.read_text().split() == ["off", "on"]


def test_interrupted_cycle_turns_power_on(log, monkeypatch):
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hil.controller.devices.power_control.power.time", SimpleNamespace(sleep=interrupted))
    with pytest.raises(KeyboardInterrupt):
        switch(Power({"off": note(log, "off"), "on": note(log, "on")}, delay=60.0), "cycle", board="b")
    assert log.read_text().split() == ["off", "on"]


def test_cycle_prefers_cycle_hook(log):
    switch(hooks(log, "on", "off", "cycle"), "cycle", board="b")
    assert log.read_text().split() == ["cycle"]


def test_http_hook_sends_request(unit):
    power = Power(
        {
            "on": Http(f"{unit.url}/3/on"),
            "off": Http(f"{unit.url}/3?do=off", "GET"),
            "reset": Http(f"{unit.url}/3", "PUT", {"X-Key": "secret"}, '{"on": true}'),
        }
    )
    assert [switch(power, action, board="b") for action in ("on", "off", "reset")] == ["relay says so"] * 3
    assert unit.requests == [
        ("POST", "/3/on", None, b""),
        ("GET", "/3?do=off", None, b""),
        ("PUT", "/3", "secret", b'{"on": true}'),
    ]


def test_refused_http_hook_raises_without_retry(unit):
    unit.status = 503
    with pytest.raises(BoardError, match="503") as caught:
        switch(Power({"on": Http(unit.url)}), "on", board="b")
    assert caught.value.detail == "relay says so"
    assert len(unit.requests) == 1


def test_http_hook_uses_login_of_url(unit):
    switch(Power({"on": Http(unit.url.replace("://", "://lab:p%40ss@") + "/3?x=a@b")}), "on", board="b")
    assert unit.requests == [("POST", "/3?x=a@b", None, b"")]
    assert unit.logins == ["Basic " + base64.b64encode(b"lab:p@ss").decode()]


@pytest.mark.parametrize("host", ["127.0.0.1:1", "127.0.0.1:port", "[::1"])
def test_http_error_hides_secrets(host):
    power = Power({"reset": Http(f"http://lab:secret@{host}/3?token=secret", "PUT", {"X-Key": "secret"}, "secret")})
    with pytest.raises(BoardError, match="reset request failed") as caught:
        switch(power, "reset", board="b")
    assert "secret" not in f"{caught.value}{caught.value.detail}"


def test_truncated_http_response_raises_board_error():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            link, _ = server.accept()
            with link:
                link.recv(4096)
                link.sendall(b"HTTP/1.1 500 no\r\nTransfer-Encoding: chunked\r\n\r\nnot a chunk\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(BoardError, match="500"):
            switch(Power({"reset": Http(f"http://127.0.0.1:{server.getsockname()[1]}/")}), "reset", board="b")


def test_unanswered_http_hook_raises_board_error():
    with pytest.raises(BoardError, match="reset request failed"):
        switch(Power({"reset": Http("http://127.0.0.1:1/")}), "reset", board="b")


# ---- unresponsive boards


def test_recover_leaves_answering_board(log):
    assert recover(lambda: "connected", hooks(log, "reset", "cycle"), board="b", say=print) == "connected"
    assert not log.exists()


@pytest.mark.parametrize("error", [BoardUnreachable, BoardLost, TurnedAway, LoginSlow])
def test_recover_stops_after_successful_reset(log, error):
    said: list[str] = []
    board = Hanging(log, "reset", error)
    assert recover(board.connect, hooks(log, "reset", "cycle"), board="b", say=said.append) == "connected"
    assert log.read_text().split() == ["reset"]
    assert said == ["b does not respond (no answer): reset"]


def test_recover_cycles_power_if_reset_does_not_help(log):
    board = Hanging(log, "cycle")
    assert recover(board.connect, hooks(log, "reset", "cycle"), board="b", say=print) == "connected"
    assert log.read_text().split() == ["reset", "cycle"]


def test_recover_cycles_power_if_reset_fails(log):
    power = Power({"reset": Command(("false",)), "off": note(log, "off"), "on": note(log, "on")}, delay=0.0)
    assert recover(Hanging(log, "on").connect, power, board="b", say=print) == "connected"
    assert log.read_text().split() == ["off", "on"]


@pytest.mark.parametrize("error", [BoardUnreachable, BoardLost])
def test_recover_preserves_error_if_hooks_do_not_help(log, error):
    with pytest.raises(error, match="a reset and a power cycle did not help: no answer"):
        recover(Hanging(log, "prayer", error).connect, hooks(log, "reset", "cycle"), board="b", say=print)
    assert log.read_text().split() == ["reset", "cycle"]


def test_recover_without_hooks_preserves_error(log):
    with pytest.raises(BoardUnreachable, match=r"^no answer$"):
        recover(Hanging(log, "x").connect, Power(), board="b", say=print)


@pytest.mark.parametrize("error", [BoardBusy, NoSuchHost, ProxyFailed])
def test_recover_does_not_reset_answering_board(log, error):
    with pytest.raises(error):
        recover(Hanging(log, "reset", error).connect, hooks(log, "reset"), board="b", say=print)
    assert not log.exists()


@pytest.mark.ci
def test_recover_waits_for_boot(log):
    tries = []

    def connect() -> str:
        tries.append(log.exists())
        if len(tries) < 4:
            raise BoardUnreachable("no answer")
        return "connected"

    assert recover(connect, hooks(log, "reset", boot_s=60.0), board="b", say=print) == "connected"
    assert tries == [False, True, True, True]
    assert log.read_text().split() == ["reset"]
