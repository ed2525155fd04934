"""Power and reset hooks: real programs, a real HTTP server, and a board that answers only after the right one."""

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

from hil.controller.devices.power import recover, switch
from hil.core.board_config import Command, Http, Power
from hil.core.boards import parse_power
from hil.errors import BoardBusy, BoardError, BoardLost, BoardUnreachable, UsageError


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def note(log: Path, *words: str) -> Command:
    """A hook that writes its words down, one a line."""
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
    """A board that answers again once its hook has run."""

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


def test_every_kind_of_hook_is_read():
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


def test_a_program_with_a_relative_path_lies_beside_the_config(tmp_path):
    power = parse_power({"reset": ["./reset.sh", "./x"], "off": ["/usr/bin/off"], "on": "on"}, tmp_path / "a.toml")
    assert power.hooks["reset"] == Command((str(tmp_path / "reset.sh"), "./x"))
    assert (power.hooks["off"], power.hooks["on"]) == (Command(("/usr/bin/off",)), Command(("on",)))


def test_the_keys_of_labgrids_external_power_driver_are_taken_as_they_are():
    power = parse_power({"cmd_on": "pdu --on 3", "cmd_off": "pdu --off 3", "delay": 5}, Path("a.toml"))
    assert power.hooks == {"on": Command(("pdu", "--on", "3")), "off": Command(("pdu", "--off", "3"))}
    assert power.delay == 5.0
    assert power.can("cycle")
    assert not power.can("reset")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"explode": ["x"]}, "no 'explode'"),
        ({"hooks": ["x"]}, "no 'hooks'"),
        ({"reset": []}, "must be a command"),
        ({"reset": ""}, "must be a command"),
        ({"reset": ["x", 1]}, "must be a command"),
        ({"reset": 3}, "must be a command"),
        ({"reset": "it's"}, "cannot be split"),
        ({"reset": {"url": "file:///etc/passwd"}}, "http://"),
        ({"reset": {"method": "GET"}}, "http://"),
        ({"reset": {"url": 3}}, "http://"),
        ({"reset": {"url": "http://x", "verify": False}}, "verify"),
        ({"reset": {"url": "http://x", "headers": "a: b"}}, "headers"),
        ({"reset": {"url": "http://x", "headers": {"a": 1}}}, "a table of texts"),
        ({"reset": {"url": "http://x", "body": 1}}, "must be text"),
        ({"on": ["x"], "cmd_on": "y"}, "twice"),
        ({"boot_s": "long"}, "seconds"),
        ({"boot_s": True}, "seconds"),
        ({"delay": -1}, "seconds"),
        ({"delay": float("nan")}, "seconds"),
        ({"boot_s": float("inf")}, "seconds"),
        ({"timeout_s": 10**400}, "seconds"),
        ({"reset": ["a\0b"]}, "no name or argument can"),
    ],
)
def test_a_wrong_table_is_told_with_its_place(table, said):
    with pytest.raises(UsageError, match=r"^a\.toml: \[power\]") as caught:
        parse_power(table, Path("a.toml"))
    assert said in str(caught.value)


# ---- one action


def test_a_command_gets_its_arguments_as_they_are(log):
    power = Power({"reset": note(log, "$(touch x)", "a b; c", "*")})
    switch(power, "reset", board="b")
    assert log.read_text() == "$(touch x)\na b; c\n*\n"


def test_what_a_command_prints_is_returned():
    assert switch(Power({"reset": Command(("echo", "relay 3 is open"))}), "reset", board="b") == "relay 3 is open"


def test_a_command_that_fails_is_told_with_its_words():
    power = Power({"reset": Command(("sh", "-c", "echo no such relay >&2; exit 3"))})
    with pytest.raises(BoardError, match="reset command ended with 3") as caught:
        switch(power, "reset", board="b")
    assert caught.value.detail == "no such relay\n"
    assert "by hand: sh -c 'echo no such relay >&2; exit 3'" in caught.value.hint


def test_a_command_that_is_not_there_is_the_configs_fault():
    with pytest.raises(UsageError, match="cannot be started"):
        switch(Power({"reset": Command(("/nowhere/relay",))}), "reset", board="b")


def test_a_command_that_hangs_is_ended_with_its_children(log):
    script = f"sleep 600 & echo $! > {log}; wait"
    power = Power({"reset": Command(("sh", "-c", script))}, timeout_s=2.0)
    with pytest.raises(BoardError, match="took over 2 s"):
        switch(power, "reset", board="b")
    child = Path("/proc") / log.read_text().strip() / "stat"
    with contextlib.suppress(OSError):  # it is gone
        eventually(lambda: child.read_text().split()[2] == "Z")


def test_an_action_without_a_hook_says_what_to_add():
    with pytest.raises(UsageError, match="how to do a reset") as caught:
        switch(Power(), "reset", board="b")
    assert "[power] reset =" in caught.value.hint


def test_a_cycle_is_off_then_on_where_there_is_no_hook_for_it(log):
    switch(hooks(log, "on", "off"), "cycle", board="b")
    assert log.read_text().split() == ["off", "on"]


def test_a_cycle_that_is_interrupted_does_not_leave_the_power_off(log, monkeypatch):
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hil.controller.devices.power.time", SimpleNamespace(sleep=interrupted))
    with pytest.raises(KeyboardInterrupt):
        switch(Power({"off": note(log, "off"), "on": note(log, "on")}, delay=60.0), "cycle", board="b")
    assert log.read_text().split() == ["off", "on"]


def test_a_cycles_own_hook_goes_first(log):
    switch(hooks(log, "on", "off", "cycle"), "cycle", board="b")
    assert log.read_text().split() == ["cycle"]


def test_an_http_hook_sends_its_request(unit):
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


def test_an_http_hook_that_is_refused_is_told_and_not_tried_again(unit):
    unit.status = 503
    with pytest.raises(BoardError, match="503") as caught:
        switch(Power({"on": Http(unit.url)}), "on", board="b")
    assert caught.value.detail == "relay says so"
    assert len(unit.requests) == 1


def test_a_login_in_an_http_hooks_address_is_used(unit):
    switch(Power({"on": Http(unit.url.replace("://", "://lab:p%40ss@") + "/3?x=a@b")}), "on", board="b")
    assert unit.requests == [("POST", "/3?x=a@b", None, b"")]
    assert unit.logins == ["Basic " + base64.b64encode(b"lab:p@ss").decode()]


@pytest.mark.parametrize("host", ["127.0.0.1:1", "127.0.0.1:port", "[::1"])
def test_no_error_shows_a_password_or_a_token(host):
    power = Power({"reset": Http(f"http://lab:secret@{host}/3?token=secret", "PUT", {"X-Key": "secret"}, "secret")})
    with pytest.raises(BoardError, match="reset request failed") as caught:
        switch(power, "reset", board="b")
    assert "secret" not in f"{caught.value}{caught.value.detail}"


def test_an_answer_that_breaks_off_is_told():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            link, _ = server.accept()
            with link:
                link.recv(4096)
                link.sendall(b"HTTP/1.1 500 no\r\nTransfer-Encoding: chunked\r\n\r\nnot a chunk\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(BoardError, match="500"):
            switch(Power({"reset": Http(f"http://127.0.0.1:{server.getsockname()[1]}/")}), "reset", board="b")


def test_an_http_hook_that_nobody_answers_is_told():
    with pytest.raises(BoardError, match="reset request failed"):
        switch(Power({"reset": Http("http://127.0.0.1:1/")}), "reset", board="b")


# ---- a board that does not answer


def test_a_board_that_answers_is_not_touched(log):
    assert recover(lambda: "connected", hooks(log, "reset", "cycle"), board="b", say=print) == "connected"
    assert not log.exists()


@pytest.mark.parametrize("error", [BoardUnreachable, BoardLost])
def test_a_reset_that_helps_is_enough(log, error):
    said: list[str] = []
    board = Hanging(log, "reset", error)
    assert recover(board.connect, hooks(log, "reset", "cycle"), board="b", say=said.append) == "connected"
    assert log.read_text().split() == ["reset"]
    assert said == ["b does not answer (no answer): reset"]


def test_where_a_reset_does_not_help_the_power_is_cycled(log):
    board = Hanging(log, "cycle")
    assert recover(board.connect, hooks(log, "reset", "cycle"), board="b", say=print) == "connected"
    assert log.read_text().split() == ["reset", "cycle"]


def test_where_a_reset_fails_the_power_is_cycled(log):
    power = Power({"reset": Command(("false",)), "off": note(log, "off"), "on": note(log, "on")}, delay=0.0)
    assert recover(Hanging(log, "on").connect, power, board="b", say=print) == "connected"
    assert log.read_text().split() == ["off", "on"]


@pytest.mark.parametrize("error", [BoardUnreachable, BoardLost])
def test_a_board_that_nothing_helps_stays_what_it_was(log, error):
    with pytest.raises(error, match="a reset and a power cycle did not help: no answer"):
        recover(Hanging(log, "prayer", error).connect, hooks(log, "reset", "cycle"), board="b", say=print)
    assert log.read_text().split() == ["reset", "cycle"]


def test_without_hooks_the_error_stays_what_it_was(log):
    with pytest.raises(BoardUnreachable, match=r"^no answer$"):
        recover(Hanging(log, "x").connect, Power(), board="b", say=print)


def test_a_board_that_answers_but_is_taken_is_not_reset(log):
    with pytest.raises(BoardBusy):
        recover(Hanging(log, "reset", BoardBusy).connect, hooks(log, "reset"), board="b", say=print)
    assert not log.exists()


def test_a_board_gets_its_time_to_boot(log):
    tries = []

    def connect() -> str:
        tries.append(log.exists())
        if len(tries) < 4:
            raise BoardUnreachable("no answer")
        return "connected"

    assert recover(connect, hooks(log, "reset", boot_s=60.0), board="b", say=print) == "connected"
    assert tries == [False, True, True, True]
    assert log.read_text().split() == ["reset"]
