"""IPv6 addresses: with and without a zone, and in other spellings."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ssh_cases.user import User, UserNamespace, host, user_namespace
from support.sshd import IS_ROOT, Sshd, running_sshd
from support.waiting import eventually

LOCAL, UNIQUE = "fe80::b", "fd77::2"
pytestmark = pytest.mark.skipif(
    not IS_ROOT or not shutil.which("ip"), reason="needs root and `ip`: a network namespace"
)


@pytest.fixture(scope="module")
def namespace() -> Iterator[tuple[str, ...]]:
    """Return the command that enters a namespace whose loopback has a link-local and a unique local address."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    enter = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")
    links = Path(f"/proc/{holder.pid}/ns/net")
    eventually(lambda: links.readlink() != Path("/proc/self/ns/net").readlink(), process=holder)
    for command in ("link set lo up", f"addr add {LOCAL}/64 dev lo nodad", f"addr add {UNIQUE}/64 dev lo nodad"):
        subprocess.run([*enter, "ip", *command.split()], check=True)
    yield enter
    holder.kill()
    holder.wait()


@pytest.fixture(scope="module")
def _namespace(namespace: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[UserNamespace]:
    with user_namespace(tmp_path_factory.mktemp("user"), namespace) as found:
        yield found


@pytest.fixture(scope="module")
def sshd(namespace: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd"), listen="::", prefix=namespace) as server:
        yield server


@pytest.fixture
def six(user: User, sshd: Sshd) -> User:
    """The user with the server's key pinned under all its addresses."""
    user.take_key(sshd.identity)
    for name in (f"{LOCAL}%lo", UNIQUE, "::1"):
        user.pin(sshd, f"[{name}]:{sshd.port}")
    return user


@pytest.mark.parametrize("address", [f"{LOCAL}%lo", UNIQUE, "::1"])
def test_ipv6_address_logs_in(six: User, sshd: Sshd, address: str) -> None:
    port = ("-p", str(sshd.port))
    six.both(f"root@{address}", f"root@[{address}]:{sshd.port}", ssh=port).assert_logged_in()
    six.both(f"root@{address}", f"ssh://root@[{address}]:{sshd.port}", ssh=port).assert_logged_in()


@pytest.mark.parametrize("name", [f"{LOCAL}%%lo", UNIQUE, "::1"])
def test_ipv6_address_in_config_logs_in(six: User, sshd: Sshd, name: str) -> None:
    six.configure(host("board", sshd, hostname=name))
    six.both().assert_logged_in()


def test_link_local_address_without_zone_fails(six: User, sshd: Sshd) -> None:
    port = ("-p", str(sshd.port))
    six.both(f"root@{LOCAL}", f"root@[{LOCAL}]:{sshd.port}", ssh=port).assert_refused("Invalid argument")


@pytest.mark.parametrize("address", ["FD77:0::2", "fd77:0:0:0:0:0:0:2"])
def test_ipv6_spelling_variants_match_ssh(six: User, sshd: Sshd, address: str) -> None:
    port = ("-p", str(sshd.port))
    six.both(f"root@{address}", f"root@[{address}]:{sshd.port}", ssh=port).assert_equal()
