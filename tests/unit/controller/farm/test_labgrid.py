"""Test the parsing of `labgrid-client` output. tests/integration/test_farm_labgrid.py uses the real client."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.farm.labgrid import LabgridPlace, borrow_place
from hil.core.board_config import Labgrid
from hil.core.boards import load_board
from hil.errors import BoardBusy, BoardError, BoardUnreachable, UsageError

SERVICE = """Acquired resource 'NetworkService' (shelf/rpi5/NetworkService/NetworkService):
  {'acquired': 'rpi5',
   'avail': True,
   'cls': 'NetworkService',
   'params': {'address': 'ADDRESS',
              'extra': {'proxy': 'shelf.lab', 'proxy_required': False},
              'username': 'root'}}
"""
SHOWN = """Place 'rpi5':
  comment: acquired: somebody/else
  matches:
    shelf/rpi5/*
  acquired: OWNER
  acquired resources:
    shelf/rpi5/NetworkService/NetworkService
"""


@pytest.fixture
def client(tmp_path: Path):
    """Make a fake labgrid-client with fixed output and exit codes."""

    def make(shown: str = SHOWN + SERVICE, acquire: str = "true") -> Labgrid:
        (tmp_path / "shown").write_text(shown.replace("OWNER", "h/hil-farm-bench").replace("ADDRESS", "10.0.0.9"))
        program = tmp_path / "labgrid-client"
        program.write_text(
            "#!/bin/sh\n"
            f'echo "$LG_COORDINATOR $LG_HOSTNAME $LG_USERNAME $*" >> {tmp_path}/calls\n'
            f'case "$3" in acquire) {acquire};; release) ;; *) cat {tmp_path}/shown;; esac\n'
        )
        program.chmod(0o755)
        return Labgrid("rpi5", "lab:20408", "", str(program))

    return make


@pytest.fixture(autouse=True)
def hostname(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "h")


def place(labgrid: Labgrid, holder: str = "bench") -> LabgridPlace:
    return LabgridPlace(labgrid, holder, "b")


def test_place_show_parses_owner_and_resources(client) -> None:
    owner, resources = place(client()).show()
    assert owner == "h/hil-farm-bench"
    assert resources["NetworkService"]["params"]["username"] == "root"


def test_place_acquire_sends_valid_owner_name(client, tmp_path: Path) -> None:
    place(client(), "berlin/1 a").acquire()
    assert (tmp_path / "calls").read_text() == "lab:20408 h hil-farm-berlin-1-a -p rpi5 acquire\n"


@pytest.mark.parametrize(
    ("change", "address"),
    [
        ({}, "root@10.0.0.9"),
        ({"'username'": "'port': 2222,\n              'username'"}, "root@10.0.0.9:2222"),
        ({"ADDRESS": "fe80::1"}, "root@[fe80::1]"),
    ],
)
def test_place_address_uses_network_service(client, change: dict[str, str], address: str) -> None:
    said = SERVICE
    for old, new in change.items():
        said = said.replace(old, new)
    labgrid = client(SHOWN + said)
    assert place(labgrid).get_address(place(labgrid).show()[1]) == address


@pytest.mark.parametrize(
    ("old", "new", "error", "says"),
    [
        ("'avail': True", "'avail': False", BoardUnreachable, "is unavailable"),
        ("'proxy_required': False", "'proxy_required': True", UsageError, "only through the proxy shelf.lab"),
        ("'username': 'root'", "'username': ''", UsageError, "lacks an address or username"),
        ("{'acquired'", "{acquired", UsageError, "no NetworkService"),
        ("Acquired resource 'NetworkService'", "Orphaned resource 'NetworkService'", UsageError, "no NetworkService"),
    ],
)
def test_place_address_rejects_unusable_service(client, old: str, new: str, error: type, says: str) -> None:
    labgrid = client(SHOWN + SERVICE.replace(old, new))
    with pytest.raises(error, match=says):
        place(labgrid).get_address(place(labgrid).show()[1])


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("labgrid-client: Error: Place rpi5 is already acquired by x/bob. To work simultaneously, ...", BoardBusy),
        ("Server error: Place rpi5 was not reserved for h/hil-farm-bench", BoardBusy),
        ("Server error: Failed to acquire resources for place rpi5", BoardBusy),
        ("labgrid-client: Error: Match a/b/* has no matching remote resource", BoardUnreachable),
        ("Server error: Error: Could not connect to coordinator", BoardUnreachable),
        ("labgrid-client: Error: place pattern rpi5 matches nothing", UsageError),
        ("Traceback: something else", BoardError),
    ],
)
def test_place_acquire_classifies_labgrid_errors(client, said: str, error: type) -> None:
    labgrid = client(SHOWN.replace("OWNER", "x/bob"), f"echo '{said}' >&2; exit 1")
    with pytest.raises(error) as raised:
        place(labgrid).acquire()
    assert raised.type is error


def test_place_acquire_accepts_already_acquired_place(client, tmp_path: Path) -> None:
    labgrid = client(acquire="echo 'You have already acquired place rpi5.'; exit 1")
    place(labgrid).acquire()
    calls = [line.split()[-1] for line in (tmp_path / "calls").read_text().splitlines()]
    assert calls == ["acquire", "show"]
    with pytest.raises(BoardBusy, match="labgrid place rpi5 is in use by h/hil-farm-bench"):
        place(labgrid, "other").acquire()


def test_borrowed_acquires_and_releases_configured_place(client, tmp_path: Path) -> None:
    path = tmp_path / "shelf.toml"
    path.write_text(f'[labgrid]\nplace = "rpi5"\nclient = "{client().client}"\n')
    with borrow_place(load_board(str(path)).config, "bench") as board:
        assert board.connection.address == "root@10.0.0.9"
    assert [line.split()[-1] for line in (tmp_path / "calls").read_text().splitlines()] == [
        "acquire",
        "show",
        "release",
    ]


def test_board_config_rejects_unknown_labgrid_key(tmp_path: Path) -> None:
    path = tmp_path / "shelf.toml"
    path.write_text('[labgrid]\nplce = "rpi5"\n')
    with pytest.raises(UsageError, match=r"\[labgrid\]: unknown key 'plce'"):
        load_board(str(path))


PORT = {"cls": "NetworkSerialPort", "params": {"host": "lab", "port": 4001, "speed": 115200, "protocol": "rfc2217"}}
RAW_PORT = {"cls": "NetworkSerialPort", "params": {"host": "fe80::1", "port": 4002, "protocol": "raw"}}
STOPPED_PORT = {"cls": "NetworkSerialPort", "params": {"host": "lab", "port": None}}


@pytest.mark.parametrize(
    ("resources", "named", "address"),
    [
        ({"a": PORT}, "", "telnet://lab:4001"),
        ({"a": RAW_PORT}, "", "tcp://[fe80::1]:4002"),
        ({"a": PORT, "b": RAW_PORT}, "", ""),
        ({"a": PORT, "b": RAW_PORT}, "b", "tcp://[fe80::1]:4002"),
        ({"a": STOPPED_PORT}, "a", ""),
        ({"a": {"cls": "NetworkService"}}, "", ""),
    ],
)
def test_place_returns_console_of_serial_port(resources, named, address) -> None:
    assert place(Labgrid("rpi5")).get_console(resources, named) == address


def test_place_without_named_console_is_usage_error() -> None:
    with pytest.raises(UsageError, match="has no NetworkSerialPort 'b'") as raised:
        place(Labgrid("rpi5")).get_console({"a": PORT}, "b")
    assert raised.value.hint == "set [console] labgrid to one of a"
