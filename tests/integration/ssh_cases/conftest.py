"""A user, and an sshd of the module's tests that lets the user in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.ssh_cases.agents import real_agent
from support.ssh_cases.user import OPENSSH, User, UserNamespace, host, user_namespace
from support.sshd import IS_ROOT, Sshd, make_key, running_sshd

NEEDS_ROOT = "the home directory in passwd is changed in a mount namespace: root's"

MakeServer = Callable[..., Sshd]


@pytest.fixture(scope="module")
def _namespace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UserNamespace]:
    if not IS_ROOT:
        pytest.skip(NEEDS_ROOT)
    with user_namespace(tmp_path_factory.mktemp("user")) as found:
        yield found


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(scope="module")
def other_sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """A second server, for jumps and mistaken addresses."""
    with running_sshd(tmp_path_factory.mktemp("other")) as server:
        yield server


@pytest.fixture
def start_sshd(tmp_path: Path) -> Iterator[MakeServer]:
    """Start an sshd with settings, which win over the usual ones, and fields of the test's own."""
    with contextlib.ExitStack() as stack:

        def start(*settings: str, name: str = "server", **fields: object) -> Sshd:
            return stack.enter_context(running_sshd(tmp_path / name, *settings, **fields))

        yield start


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str:
    """What hil logs in with: `ssh` or, where a test asks for it, paramiko."""
    return str(getattr(request, "param", OPENSSH))


@pytest.fixture
def user(_namespace: UserNamespace, sshd: Sshd, tmp_path: Path, transport: str) -> User:
    """A user who has the module's server in known_hosts, and no key yet."""
    user = User(_namespace, tmp_path, transport)
    user.pin(sshd)
    user.configure(host("board", sshd))
    return user


@pytest.fixture
def keyed(user: User, sshd: Sshd) -> User:
    """The user with a key that the server accepts, in ~/.ssh."""
    user.take_key(sshd.identity)
    return user


@pytest.fixture
def agent(user: User, tmp_path: Path) -> Iterator[Path]:
    """The user's ssh-agent, without keys."""
    with real_agent(tmp_path) as path:
        user.env["SSH_AUTH_SOCK"] = str(path)
        yield path


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """A key that no server accepts."""
    return make_key(tmp_path / "stranger")
