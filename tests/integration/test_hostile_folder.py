"""`hil` in a hostile directory: no code of it runs, writes elsewhere or sends data."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from onnx import TensorProto, helper
from support.hostile_folders import hostile_modules, run
from support.models import save_model
from support.schemas import check_document

from hil.core.processes import make_module_command

Hil = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "cloned"
    (made / "board_configs").mkdir(parents=True)
    node = helper.make_node("Add", ["x", "x"], ["y"], "twice")
    value = (TensorProto.FLOAT, [4])
    save_model(made / "doubling.onnx", [node], [("x", *value)], [("y", *value)])
    return made


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "it ran"


@pytest.fixture
def there(folder: Path, environment: dict[str, str]) -> Hil:
    """Return a function that runs `hil ARGS...` in the directory."""

    def call(*words: object) -> subprocess.CompletedProcess[str]:
        done = run(words, folder, environment)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return call


@contextlib.contextmanager
def listening() -> Iterator[tuple[str, list[bytes]]]:
    """Yield an address and the data sent to it."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hear() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                heard.append(b"")
                with connection:
                    connection.settimeout(1)
                    with contextlib.suppress(OSError):
                        heard.append(connection.recv(1 << 16))

        thread = threading.Thread(target=hear, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}", heard
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_untrusted_board_config_cannot_run_commands(folder, there, marker):
    power = f'[connection]\naddress = "unix:{folder}/none.sock"\n[power]\nreset = ["touch", "{marker}"]\nboot_s = 1\n'
    flags = f'[simulator]\n[compile_flags]\niree = ["--iree-hal-dump-executable-sources-to={marker}"]\n'
    for name, text in (("sim", power), ("generic", power), ("kitchen", power), ("flags", flags)):
        (folder / "board_configs" / f"{name}.toml").write_text(text)
    assert there("run", "doubling.onnx").returncode == 0
    assert there("run", "doubling.onnx", "--board", "sim").returncode == 0
    assert there("bench", "doubling.onnx", "--runtime-hw-type", "sim", "--iterations", 3).returncode == 0
    for words in (
        ("run", "doubling.onnx", "--board", "kitchen"),
        ("run", "doubling.onnx", "--runtime-hw-type", "flags"),
        ("compile", "doubling.onnx", "--runtime-hw-type", "flags"),
        ("board", "reset", "kitchen"),
        ("board", "check", "kitchen"),
        ("suite", "run", "@models", "--filter", "digits", "--board", "kitchen"),
        ("farm", "host"),
    ):
        done = there(*words)
        if words == ("farm", "host"):  # it reports the missing farm first
            continue
        assert done.returncode == 2 and "have not trusted" in done.stderr, done.stderr
        assert "hil board trust" in done.stderr
    for words in (("board", "list"), ("board", "show", "kitchen"), ("board", "trust", "--list")):
        assert there(*words).returncode == 0
    assert not marker.exists()


def test_untrusted_project_file_cannot_select_board(folder, there, environment, marker, tmp_path):
    power = f'[power]\nreset = ["touch", "{marker}"]\ncycle = ["touch", "{marker}"]\n'
    boards = tmp_path / "config" / "hil" / "boards"
    boards.mkdir(parents=True)
    environment["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    with listening() as (address, heard):
        # The user's board, which an author of a project may know by name.
        (boards / "kitchen.toml").write_text(f'[board]\nhw_type = "k"\n[connection]\naddress = "{address}"\n{power}')
        (folder / "hil.toml").write_text(f'[defaults]\nboard = "kitchen"\nout = ".."\nweb_url = "http://{address}"\n')
        for words in (
            ("run", "doubling.onnx"),
            ("board", "check"),
            ("board", "reset"),
            ("runs", "gc", "--keep", 0),
            ("publish", "latest", "--token", "secret"),
        ):
            done = there(*words)
            assert done.returncode == 2 and "have not trusted" in done.stderr, done.stderr
        for words in (("config", "show"), ("doctor", "--quick")):
            assert there(*words).returncode == 0
        assert heard == []
    assert not marker.exists()


@pytest.mark.slow
def test_untrusted_flow_flags_need_trust(folder, there, marker):
    flags = f'compile_flags = ["--iree-hal-dump-executable-sources-to={marker}"]\n'
    (folder / "flows.toml").write_text("".join(f'[{name}]\nruntime = "iree"\n{flags}' for name in ("iree", "mine")))
    assert there("flows").returncode == 0
    assert there("suite", "run", "@models", "--filter", "digits", "--no-layers").returncode == 0
    for words in (("suite", "run", "@models", "--filter", "digits"), ("bisect", "doubling.onnx")):
        done = there(*words, "--flow", "mine")
        assert done.returncode == 2 and "have not trusted" in done.stderr, done.stderr
    assert not marker.exists()
    assert "compile_flags of mine" in there("board", "trust", ".").stdout
    assert there("suite", "run", "@models", "--filter", "digits", "--no-layers", "--flow", "mine").returncode == 0
    assert marker.exists()


def test_untrusted_board_config_cannot_obtain_token(folder, there, environment):
    (folder / "secret").write_text("the first line\n")
    environment["HIL_AGENT_TOKEN"] = "the-users-token"
    with listening() as (address, heard):
        for name, more in (("kitchen", ""), ("reader", f'token_file = "{folder}/secret"\n')):
            text = f'[connection]\naddress = "{address}"\n{more}'
            (folder / "board_configs" / f"{name}.toml").write_text(text)
            done = there("run", "doubling.onnx", "--board", name)
            assert done.returncode == 2 and "have not trusted" in done.stderr
    assert heard == []


@pytest.mark.slow
def test_board_trust_json_matches_schema(folder, there):
    (folder / "board_configs" / "kitchen.toml").write_text('[connection]\naddress = "unix:/a"\n')
    for words, verb in (
        (("list",), "list"),
        (("trust", "."), "trust"),
        (("trust", "--list"), "trust"),
        (("list",), "list"),
        (("show", "kitchen"), "show"),
        (("trust", "--remove", "."), "trust"),
    ):
        document = json.loads(there("board", *words, "--json").stdout)
        check_document(document, f"board {verb}")
    assert there("board", "trust").returncode == there("board", "trust", ".", "--list").returncode == 2
    assert there("board", "trust", "nowhere").returncode == there("board", "trust", "--remove", ".").returncode == 2


def test_trust_ends_when_config_changes(folder, there, marker):
    config = folder / "board_configs" / "kitchen.toml"
    config.write_text(
        f'[connection]\naddress = "unix:{folder}/none.sock"\n[power]\nreset = ["touch", "{marker}"]\nboot_s = 0\n'
    )
    trusted = there("board", "trust", ".", "--json")
    assert trusted.returncode == 0 and "[power] reset" in trusted.stdout
    assert there("run", "doubling.onnx", "--board", "kitchen").returncode == 4
    assert marker.exists()
    marker.unlink()
    config.write_text(config.read_text().replace("boot_s = 0", "boot_s = 1"))
    altered = there("run", "doubling.onnx", "--board", "kitchen")
    assert altered.returncode == 2 and "altered since" in altered.stderr and not marker.exists()
    assert '"state": "altered"' in there("board", "trust", "--list", "--json").stdout
    assert there("board", "trust", "--remove", ".").returncode == 0
    assert there("board", "trust", "--remove", ".").returncode == 2
    typed = there("run", "doubling.onnx", "--board", "board_configs/kitchen.toml")
    assert typed.returncode == 4 and marker.exists()


def test_cli_ignores_modules_in_working_directory(folder, there, marker, environment):
    hostile_modules(folder, marker)
    for words in (
        ("run", "doubling.onnx"),
        ("run", "doubling.onnx", "--runtime", "onnxruntime", "--reference", "iree-llvm-cpu"),
        ("flows",),
        ("compile", "doubling.onnx", "--compile-time-profile", "times"),
        ("suite", "run", "@models", "--filter", "digits", "--no-layers"),
    ):
        done = there(*words)
        assert done.returncode == 0, done.stderr
        assert not marker.exists(), marker.read_text()


def test_pip_command_ignores_modules_in_working_directory(folder, marker, monkeypatch):
    """hil uses pip to fetch packages for boards."""
    hostile_modules(folder, marker)
    monkeypatch.chdir(folder)
    done = subprocess.run(make_module_command("pip", "--version"), capture_output=True, text=True)
    assert done.returncode == 0 and "pip" in done.stdout, done.stderr
    assert not marker.exists()


@pytest.mark.slow
def test_python_m_hil_ignores_modules_in_working_directory(folder, marker, environment):
    """Only `python -P` protects modules that Python imports earlier (runpy, typing, ...)."""
    hostile_modules(folder, marker)
    for name in ("runpy", "typing"):
        (folder / f"{name}.py").unlink()
    for name in ("hil", "iree"):
        shutil.rmtree(folder / name)
    clean = {key: value for key, value in environment.items() if not key.startswith("PYTHON")}
    for module, words in (("hil", ("run", "doubling.onnx")), ("hil.agent", ("--help",)), ("hil.sim", ("--help",))):
        command = [sys.executable, "-m", module, *words]
        done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert not marker.exists(), marker.read_text()


def test_resume_rejects_altered_run_and_suite(folder, there, marker):
    """The record's request contains a compiler flag that writes and a board with a power command."""
    begun = there("run", "doubling.onnx", "--json")
    run = folder / "hil-runs" / json.loads(begun.stdout)["id"]
    record = json.loads((run / "run.json").read_text())
    record["request"]["compile_flags"] = [f"--iree-hal-dump-executable-sources-to={marker}"]
    record.update(cases=[], finished=False, outcome=None)
    (run / "run.json").write_text(json.dumps(record))
    resumed = there("run", "--resume", run.name)
    assert resumed.returncode == 2 and "was not started by this user" in resumed.stderr
    suite = there("suite", "run", "@models", "--filter", "digits", "--no-layers", "--out", "stored")
    assert suite.returncode == 0
    head = json.loads((folder / "stored" / "suite.json").read_text())
    head["request"]["settings"]["debug_ir"] = str(marker)
    (folder / "stored" / "suite.json").write_text(json.dumps(head))
    resumed = there("suite", "run", "--resume", "stored")
    assert resumed.returncode == 2 and "was not started by this user" in resumed.stderr
    assert not marker.exists()
