"""The user's ssh agent for paramiko. A failing agent or key does not prevent other login methods."""

from __future__ import annotations

import struct
from typing import Any

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.agent import SSH2_AGENT_IDENTITIES_ANSWER, cSSH2_AGENTC_REQUEST_IDENTITIES
from paramiko.auth_strategy import InMemoryPrivateKey

# Timeout for listing keys. Using a key may require confirmation by the user, so signing has a longer timeout.
_LIST_SECONDS = 10.0
_SIGN_SECONDS = 120.0
# Same limit as in OpenSSH's agent.
_MAX_MESSAGE_BYTES = 256 << 10


class AgentKey(InMemoryPrivateKey):
    """Key in the ssh agent."""

    def __str__(self) -> str:
        return f"the agent's key {self.pkey.fingerprint}"


class KeyAgent(paramiko.Agent):
    """Client for the agent at SSH_AUTH_SOCK, if set.

    Attributes:
        fault: Why the keys are unknown; "" if they were listed.
    """

    # Missing in paramiko's type stubs.
    _conn: Any
    _keys: tuple[paramiko.AgentKey, ...]

    def __init__(self) -> None:
        self.fault = ""
        super().__init__()

    def _connect(self, conn: Any) -> None:
        self._conn = conn
        conn.settimeout(_LIST_SECONDS)
        try:
            # Missing in paramiko's type stubs.
            kind, answer = self._send_message(cSSH2_AGENTC_REQUEST_IDENTITIES)  # type: ignore[attr-defined]
            if kind != SSH2_AGENT_IDENTITIES_ANSWER:
                raise paramiko.SSHException("missing list of keys in the response")
            blobs = _read_blobs(answer.get_remainder())
        except TimeoutError:
            self.fault = f"did not respond within {_LIST_SECONDS:g} s"
        except (paramiko.SSHException, OSError, TypeError, struct.error) as error:  # an empty reply causes a TypeError
            self.fault = f"failed: {error}"
        else:
            self._keys = tuple(key for blob in blobs if (key := self._make_key(blob)))
            conn.settimeout(_SIGN_SECONDS)

    def _make_key(self, blob: bytes) -> paramiko.AgentKey | None:
        """Return a key, or None if it is invalid. ssh also skips invalid keys."""
        try:
            return paramiko.AgentKey(self, blob)
        except (paramiko.SSHException, ValueError, UnsupportedAlgorithm):
            return None

    def _read_all(self, wanted: int) -> bytes:
        if wanted > _MAX_MESSAGE_BYTES:
            raise paramiko.SSHException("response exceeds the size limit")
        data: bytes = super()._read_all(wanted)  # type: ignore[misc]  # paramiko's types leave it out
        return data


def _read_blobs(data: bytes) -> list[bytes]:
    """Parse the public keys of a list, without their comments, which may have any encoding. Raises SSHException."""
    (count,), at = struct.unpack_from(">I", data), 4
    strings: list[bytes] = []
    while at < len(data) and len(strings) < 2 * count:
        (size,) = struct.unpack_from(">I", data, at)
        strings.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    if at > len(data) or len(strings) != 2 * count:
        raise paramiko.SSHException("invalid list of keys")
    return strings[::2]
