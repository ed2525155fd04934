"""`hil board deploy --package` installs a vendor's package next to the agent, over a real sshd."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.commands import Ended
from support.models import DIGITS
from support.npx import EXAMPLE, install_npx
from support.sshd import IS_ROOT, LOOPBACK, Sshd, running_sshd

pytestmark = pytest.mark.skipif(not IS_ROOT, reason="logs in as root")

MODEL = DIGITS / "digits_cnn.onnx"


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def board(sshd: Sshd, tmp_path: Path, hil: Callable[..., Ended]) -> Iterator[Path]:
    """Config of a board in an own directory of this machine."""
    folder = tempfile.mkdtemp(prefix="hil-deployed-")
    config = tmp_path / "vendor.toml"
    config.write_text(
        f'[board]\nruntime = "npx"\n[connection]\naddress = "root@{LOOPBACK}:{sshd.port}"\nfolder = "{folder}"\n'
        f'identity = "{sshd.identity}"\nknown_hosts = "{sshd.known_hosts}"\n'
    )
    yield config
    assert hil("board", "clean", config).code == 0
    shutil.rmtree(folder, ignore_errors=True)


def test_deployed_package_runs_model(
    board: Path, hil: Callable[..., Ended], environment: dict[str, str], tmp_path: Path
) -> None:
    install_npx(tmp_path / "site", environment)  # the compiler on this machine

    first = hil("board", "deploy", board, "--package", EXAMPLE, "--json")
    assert first.code == 0, first.err
    document = first.document
    assert document["runtimes"] == ["npx"]
    (package,) = document["packages"]
    assert package["name"] == "hil-npx 0.1.0" and package["runtimes"] == ["npx"]
    installed = Path(document["folder"], "packages", package["id"])
    assert (installed / "hil_npx" / "runtime.py").read_bytes() == (EXAMPLE / "hil_npx" / "runtime.py").read_bytes()

    again = hil("board", "deploy", board, "--package", EXAMPLE, "--json")
    assert again.document["pushed_bytes"] == 0 and again.document["build"] == document["build"]

    ended = hil("run", MODEL, "--board", board, "--json")
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.err
    assert ended.case["artifact"]["runtime"] == "npx"


@pytest.mark.slow
def test_package_that_fails_on_board_is_reported(board: Path, hil: Callable[..., Ended], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(EXAMPLE, broken)
    runtime = broken / "hil_npx" / "runtime.py"
    runtime.write_text("import hil.plugins\n" + runtime.read_text().replace("from __future__ import annotations", ""))

    ended = hil("board", "deploy", board, "--package", broken)

    assert ended.code == 4
    assert "the runtime npx does not work on the board" in ended.err and "hil.plugins" in ended.err
