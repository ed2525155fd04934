from pathlib import Path

import pytest

from hil.controller.devices.ssh.address import Address, read_ssh_config, route, settings_for
from hil.errors import UsageError


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes ``~/.ssh/config``, and files beside it; reads them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()

    def read(text: str, **beside: str):
        for name, content in {"config": text, **beside}.items():
            (tmp_path / ".ssh" / name).write_text(content)
        return read_ssh_config()

    return read


def test_what_is_read_of_a_host(config, tmp_path: Path) -> None:
    found = settings_for(
        config(
            "Host pi\n IdentityFile ~/a\n IdentityFile /b\n IdentitiesOnly yes\n"
            ' UserKnownHostsFile ~/k "%d/with space"\n ProxyCommand nc %h %p\n'
        ),
        "pi",
    )
    assert found.identities == (tmp_path / "a", Path("/b"))
    assert found.only_identities
    assert found.known_hosts == (tmp_path / "k", tmp_path / "with space")
    assert found.proxy_command == "nc pi 22"


def test_an_include_lasts_as_long_as_its_file(config) -> None:
    text = "Include more\nPort 1\nHost b\n Include more\n User outer\n"
    read = config(text, more="User inner\nHost a\n Port 2\n")
    # OpenSSH says the same of this: `ssh -G -F ~/.ssh/config a`
    assert [read.lookup(name).get("port") for name in "ab"] == ["2", "1"]
    assert [read.lookup(name)["user"] for name in "ab"] == ["inner", "inner"]


def test_an_include_of_itself_is_the_users_mistake(config) -> None:
    with pytest.raises(UsageError, match="included too deeply"):
        config("Include config\n")


def test_jumps_lead_one_to_the_other(config) -> None:
    read = config("Host pi\n ProxyJump me@far:7,near\nHost far\n ProxyJump first\nHost near\n ProxyJump ignored\n")
    assert [str(one) for one in route(read, Address("pi", "root"))] == ["first", "me@far:7", "near", "root@pi"]


def test_a_jump_is_not_reached_through_itself(config) -> None:
    read = config("Host *\n ProxyJump gate\n")
    assert [str(one) for one in route(read, Address("pi"))] == ["gate", "pi"]
