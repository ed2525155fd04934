"""Sign and verify bundles with ed25519 keys in OpenSSH's or OpenSSL's format.

The signature covers a prefix specific to hil, followed by the manifest. The prefix prevents the reuse of signatures for
other purposes. The manifest contains the digests of all other parts: program files, inputs, expected outputs. With the
program of a signed bundle, hil sends the board an additional file that authenticates the other files
(:func:`add_seal`).

The package `cryptography` is imported on first use. A board needs it only to check signatures.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hil.bundles.layout import Head
from hil.core.digest import digest_of
from hil.core.files import MAX_TEXT_BYTES, read_file
from hil.core.results import Artifact
from hil.errors import UsageError

_CONTEXT = b"hil bundle manifest 1\0"
_KIND = b"ssh-ed25519"
_MAKE = "create with: ssh-keygen -t ed25519 -N '' -f signing_key"
# Name of the program file with the bundle's header and manifest. No other file can have this name, because manifests
# reject names with a colon.
SEAL = "hil:bundle"


def format_fingerprint(public_key: bytes) -> str:
    """Return a key's fingerprint as in ``ssh-keygen -l``: ``SHA256:...``."""
    blob = b"".join(struct.pack(">I", len(part)) + part for part in (_KIND, public_key))
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def sign(head: Head, key: Path) -> Head:
    """Return the header and manifest with a signature.

    Args:
        key: file with a private ed25519 key without a passphrase, in OpenSSH or PEM format.

    Raises:
        UsageError: the file does not contain such a key, or `cryptography` is not installed.
    """
    private = _read_private_key(key)
    signature = private.sign(_CONTEXT + head.manifest)
    return Head(head.size, head.manifest, private.public_key().public_bytes_raw(), signature)


def verify(head: Head, trusted: Sequence[bytes] | None = None) -> str:
    """Verify a bundle's signature, and return the signing key's fingerprint.

    Args:
        trusted: accepted public keys (:func:`read_public_keys`). With None, any key is accepted. The check then proves
            only that nobody changed the file after signing.

    Raises:
        UsageError: the bundle is unsigned, the key is not trusted, the signature is wrong, or `cryptography` is
            not installed.
    """
    if not head.signature:
        raise UsageError("the bundle is not signed", hint="sign the bundle with: hil bundle create --sign KEY")
    by = format_fingerprint(head.public_key)
    if trusted is not None and head.public_key not in trusted:
        known = ", ".join(map(format_fingerprint, trusted)) or "none"
        raise UsageError(f"the bundle is signed with the untrusted key {by}", hint=f"trusted: {known}")
    from_raw = _import_cryptography().hazmat.primitives.asymmetric.ed25519.Ed25519PublicKey.from_public_bytes
    from cryptography.exceptions import InvalidSignature

    try:
        from_raw(head.public_key).verify(head.signature, _CONTEXT + head.manifest)
    except (InvalidSignature, ValueError) as error:
        raise UsageError(
            f"the bundle's signature by key {by} is invalid", hint="get the file from the signer of the bundle"
        ) from error
    return by


def read_public_keys(path: Path) -> tuple[bytes, ...]:
    """Return the ed25519 keys in a file: a PEM key, or OpenSSH public keys, a line each.

    Empty lines and lines starting with # are skipped.

    Raises:
        UsageError: the file cannot be read, has no key, or has other content.
    """
    serialization = _import_cryptography().hazmat.primitives.serialization
    data = _read(path)
    if data.lstrip().startswith(b"-----BEGIN"):
        return (_load_raw_key(path, 1, serialization.load_pem_public_key, data),)
    lines = [(number, line.strip()) for number, line in enumerate(data.splitlines(), 1)]
    found = tuple(
        _load_raw_key(path, number, serialization.load_ssh_public_key, line)
        for number, line in lines
        if line and not line.startswith(b"#")
    )
    if not found:
        raise UsageError(
            f"{path} contains no keys", hint="write an OpenSSH public key per line: ssh-ed25519 AAAA... name"
        )
    return found


def _load_raw_key(path: Path, line: int, load: Any, data: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = load(data)
    except Exception as error:  # exception types differ: ValueError, UnsupportedAlgorithm and more
        raise UsageError(f"{path}:{line}: invalid public key: {error}", hint=_MAKE) from error
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{path}:{line} is not an ed25519 key", hint=_MAKE)
    return key.public_bytes_raw()


def _read_private_key(path: Path) -> Any:
    serialization = _import_cryptography().hazmat.primitives.serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    data = _read(path)
    openssh = b"OPENSSH PRIVATE KEY" in data
    load = serialization.load_ssh_private_key if openssh else serialization.load_pem_private_key
    try:
        key = load(data, password=None)
    except Exception as error:
        raise UsageError(
            f"cannot use the private key {path}: {error}",
            hint=f"use an ed25519 key without a passphrase; {_MAKE}",
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} is not an ed25519 key", hint=_MAKE)
    return key


def _read(path: Path) -> bytes:
    try:
        return read_file(path, MAX_TEXT_BYTES)
    except OSError as error:
        raise UsageError(f"the key {path} cannot be read: {error.strerror}") from error


def _import_cryptography() -> Any:
    try:
        import cryptography.hazmat.primitives.asymmetric.ed25519
        import cryptography.hazmat.primitives.serialization
    except ImportError as error:
        raise UsageError(
            "signatures need the Python package cryptography, which is not installed",
            hint="pip install cryptography",
        ) from error
    return cryptography


def add_seal(program: Artifact, head: Head, folder: Path) -> Artifact:
    """Add one file to the program of a signed bundle: the bundle's header and manifest.

    Return the program of an unsigned bundle unchanged.
    """
    if not head.signature:
        return program
    data = head.to_bytes()
    path = folder / "seal"
    path.write_bytes(data)
    return replace(program, files={**program.files, SEAL: path}, digests={**program.digests, SEAL: digest_of(data)})
