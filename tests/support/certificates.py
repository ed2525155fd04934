"""TLS certificates for tests, with any lifetime."""

from __future__ import annotations

import ipaddress
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from hil.protocol.certificates import TlsFiles


def write_certificate(
    folder: Path, name: str = "farm", *, valid_s: float = 86400.0, hosts: tuple[str, ...] = ()
) -> TlsFiles:
    """Write a self-signed certificate and its key, atomically as certbot does. Existing files are replaced.

    Args:
        valid_s: seconds until the certificate expires.
        hosts: names or addresses in addition to localhost and 127.0.0.1.
    """
    key = generate_private_key(SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(seconds=valid_s))
        .add_extension(x509.SubjectAlternativeName([_name(host) for host in ("localhost", "127.0.0.1", *hosts)]), False)
        .sign(key, SHA256())
    )
    files = TlsFiles(folder / f"{name}.pem", folder / f"{name}.key")
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for path, data in ((files.key, pem), (files.cert, made.public_bytes(Encoding.PEM))):
        new = path.with_suffix(".new")
        new.write_bytes(data)
        new.replace(path)
    return files


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
