"""Signatures with OpenSSH keys, over all contents of a bundle."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from support.bundle_files import bundle, case

from hil.bundles import Bundle
from hil.bundles.signature import format_fingerprint, read_public_keys, verify
from hil.errors import UsageError


def new_key(path: Path, form: PrivateFormat = PrivateFormat.OpenSSH, key=None) -> Path:
    """Write a private key, and the public key next to it."""
    key = key or Ed25519PrivateKey.generate()
    path.write_bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b" a comment\n")
    return path


@pytest.fixture
def key(tmp_path) -> Path:
    return new_key(tmp_path / "key")


@pytest.fixture
def signed(tmp_path, key) -> Path:
    bundle(tmp_path).save(tmp_path / "b.hilb", key=key)
    return tmp_path / "b.hilb"


def test_verify_returns_fingerprint_of_signer(signed, key):
    (public,) = read_public_keys(key.with_suffix(".pub"))
    assert verify(Bundle.open(signed).head, [public]) == verify(Bundle.open(signed).head) == format_fingerprint(public)


def test_fingerprint_matches_openssh(key):
    done = subprocess.run(["ssh-keygen", "-lf", key.with_suffix(".pub")], capture_output=True, text=True)
    (public,) = read_public_keys(key.with_suffix(".pub"))
    assert format_fingerprint(public) in done.stdout


@pytest.mark.parametrize("form", [PrivateFormat.OpenSSH, PrivateFormat.PKCS8])
def test_keys_load_in_openssh_and_pem_format(tmp_path, form):
    key = new_key(tmp_path / "other", form)
    head = bundle(tmp_path).save(tmp_path / "b.hilb", key=key)
    pem = tmp_path / "public.pem"
    raw = Ed25519PrivateKey.from_private_bytes(b"x" * 32).public_key()
    pem.write_bytes(raw.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    assert verify(head, read_public_keys(tmp_path / "other.pub"))
    with pytest.raises(UsageError, match="untrusted key"):
        verify(head, read_public_keys(pem))


def test_verify_accepts_any_trusted_key(tmp_path, signed, key):
    other = new_key(tmp_path / "other").with_suffix(".pub")
    trusted = tmp_path / "trusted"
    trusted.write_text(f"# who may sign\n\n{other.read_text()}{key.with_suffix('.pub').read_text()}")
    assert verify(Bundle.open(signed).head, read_public_keys(trusted))


def test_verify_rejects_unsigned_or_untrusted_bundle(tmp_path, signed, key):
    trusted = read_public_keys(new_key(tmp_path / "other").with_suffix(".pub"))
    with pytest.raises(UsageError, match="untrusted key"):
        verify(Bundle.open(signed).head, trusted)
    with pytest.raises(UsageError, match="is not signed"):
        verify(bundle(tmp_path).head, read_public_keys(key.with_suffix(".pub")))


def test_verify_detects_every_changed_byte(tmp_path, signed):
    raw = signed.read_bytes()
    path = tmp_path / "changed.hilb"
    for at in [*range(192), *range(192, len(raw), 41)]:
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(UsageError):
            verify(Bundle.open(path).head)


def test_verify_rejects_signature_of_different_bundle(tmp_path, signed):
    head = Bundle.open(signed).head
    other = bundle(tmp_path, case(5)).head
    with pytest.raises(UsageError, match=r"signature by key .* is invalid"):
        verify(replace(other, public_key=head.public_key, signature=head.signature))


def test_signature_does_not_change_digest(tmp_path, signed):
    assert Bundle.open(signed).digest == bundle(tmp_path).digest


def test_bundle_save_retains_signature(tmp_path, signed):
    Bundle.open(signed).save(tmp_path / "copy.hilb")
    assert (tmp_path / "copy.hilb").read_bytes() == signed.read_bytes()


def test_keys_report_unusable_files(tmp_path, key):
    locked = tmp_path / "locked"
    locked.write_bytes(
        Ed25519PrivateKey.generate().private_bytes(
            Encoding.PEM, PrivateFormat.OpenSSH, BestAvailableEncryption(b"secret")
        )
    )
    other_kind = new_key(tmp_path / "ec", key=generate_private_key(SECP256R1()))
    junk = tmp_path / "junk"
    junk.write_bytes(b"\xff\x00")
    empty = tmp_path / "empty"
    empty.write_text("# nobody\n")
    for path, message in [
        (tmp_path / "missing", "cannot be read"),
        (locked, "cannot use the private key"),
        (other_kind, "is not an ed25519 key"),
        (junk, "cannot use the private key"),
        (key.with_suffix(".pub"), "cannot use the private key"),
    ]:
        with pytest.raises(UsageError, match=message):
            bundle(tmp_path).save(tmp_path / "b.hilb", key=path)
    for path, message in [
        (tmp_path / "missing", "cannot be read"),
        (other_kind.with_suffix(".pub"), "is not an ed25519 key"),
        (junk, "invalid public key"),
        (key, "invalid public key"),
        (empty, "contains no keys"),
    ]:
        with pytest.raises(UsageError, match=message):
            read_public_keys(path)


def test_verify_without_cryptography_suggests_install(tmp_path, signed):
    script = (
        "import sys; sys.modules['cryptography'] = None; from pathlib import Path; from hil.bundles import Bundle;"
        "from hil.bundles.signature import verify; verify(Bundle.open(Path(sys.argv[1])).head)"
    )
    done = subprocess.run([sys.executable, "-c", script, signed], capture_output=True, text=True)
    assert "pip install cryptography" in done.stderr
