import pytest

from hil.controller.devices.ssh.address import Address, is_ssh_address, parse_address
from hil.errors import UsageError


@pytest.mark.parametrize(
    ("text", "address", "shown"),
    [
        ("root@10.0.0.2", Address("10.0.0.2", "root"), "root@10.0.0.2"),
        ("root@10.0.0.2:2222", Address("10.0.0.2", "root", 2222), "root@10.0.0.2:2222"),
        ("root@host:22", Address("host", "root", 22), "root@host"),
        ("host", Address("host"), "host"),
        ("ssh:pi", Address("pi"), "pi"),
        ("ssh:me@pi_4.lab:22022", Address("pi_4.lab", "me", 22022), "me@pi_4.lab:22022"),
        ("ssh://me@pi:7", Address("pi", "me", 7), "me@pi:7"),
        ("root@::1", Address("::1", "root"), "root@::1"),
        ("root@[::1]:2200", Address("::1", "root", 2200), "root@[::1]:2200"),
        ("root@fe80::1%eth0", Address("fe80::1%eth0", "root"), "root@fe80::1%eth0"),
        ("me@corp@host", Address("host", "me@corp"), "me@corp@host"),
    ],
)
def test_parse_address_accepts_user_host_and_port(text: str, address: Address, shown: str) -> None:
    assert parse_address(text) == address
    assert str(address) == shown
    assert is_ssh_address(text) == (text != "host")


@pytest.mark.parametrize(
    "text",
    [
        *("", "@", "root@", "@host", "ssh:", "ssh://", "root@-v", "-v@host", "root@a b", "root@host\n", "root@host:0"),
        *("root@host:65536", "root@host:", "root@host:x", "root@[::1", "root@$(id)", "root@a/b", "'@host", "u:pw@host"),
        *("a;id@host", "a|id@host", "`id`@host", "\\@host"),
    ],
)
def test_parse_address_rejects_invalid_text(text: str) -> None:
    with pytest.raises(UsageError, match="invalid SSH address"):
        parse_address(text)


@pytest.mark.parametrize("text", ["unix:/run/a@b.sock", "localhost:5000", "rpi5", "boards/a@b.toml", "./me@host"])
def test_ssh_address_check_excludes_other_addresses(text: str) -> None:
    assert not is_ssh_address(text)
