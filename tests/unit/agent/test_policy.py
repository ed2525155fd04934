"""An agent with trusted keys loads only what those keys signed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from support.bundle_files import bundle, case

from hil.agent.programs import Policy
from hil.agent.store import BlobStore
from hil.bundles.signature import SEAL, add_seal
from hil.core.digest import digest_of
from hil.errors import LoadFailed, RunFailed
from hil.protocol.v1 import agent_pb2 as pb


@pytest.fixture
def key(tmp_path) -> Path:
    path = tmp_path / "key"
    made = Ed25519PrivateKey.generate()
    path.write_bytes(made.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    return path


@pytest.fixture
def store(tmp_path) -> BlobStore:
    return BlobStore(tmp_path / "store")


@pytest.fixture
def asked(tmp_path, key, store):
    """Return the load request for a signed bundle, and a policy that accepts it."""
    made = bundle(tmp_path)
    head = made.save(tmp_path / "b.hilb", key=key)
    (tmp_path / "out").mkdir()
    program = add_seal(made.extract(tmp_path / "out"), head, tmp_path)
    for name, digest in program.digests.items():
        put(store, digest, program.files[name].read_bytes())
    request = pb.LoadRequest(main=program.main, runtime=program.runtime, function="f")
    request.files.extend(pb.ProgramFile(name=name, digest=digest) for name, digest in program.digests.items())
    return request, Policy((head.public_key,))


def put(store: BlobStore, digest: str, data: bytes) -> None:
    with store.upload(digest, len(data), 0) as upload:
        upload.write(memoryview(data))
        upload.finish()


def test_policy_accepts_signed_program(asked, store):
    request, policy = asked
    policy.check_load(request, store)


@pytest.mark.parametrize(
    "change",
    [
        lambda request: request.files.pop(),
        lambda request: request.files.pop(0),
        lambda request: request.files.add(name="more", digest=request.files[0].digest),
        lambda request: request.files.add(name=request.files[0].name, digest=request.files[0].digest),
        lambda request: setattr(request.files[0], "digest", request.files[1].digest),
        lambda request: setattr(request.files[1], "name", "other.irpa"),
        lambda request: setattr(request, "main", request.files[1].name),
        lambda request: setattr(request, "runtime", "other"),
        lambda request: setattr(request, "function", "g"),
        lambda request: setattr(request, "function", ""),
        lambda request: setattr(request.files[-1], "digest", request.files[0].digest),
    ],
)
def test_policy_rejects_load_request_unlike_signed_bundle(asked, store, change):
    request, policy = asked
    change(request)
    with pytest.raises(LoadFailed, match="programs of signed bundles"):
        policy.check_load(request, store)


def test_policy_rejects_untrusted_key(asked, store):
    request, _ = asked
    with pytest.raises(LoadFailed, match="untrusted key"):
        Policy((b"k" * 32,)).check_load(request, store)


def test_policy_rejects_head_of_unsigned_bundle(asked, store, tmp_path):
    request, policy = asked
    data = bundle(tmp_path, case()).head.to_bytes()
    put(store, digest_of(data), data)
    (seal,) = [file for file in request.files if file.name == SEAL]
    seal.digest = digest_of(data)
    with pytest.raises(LoadFailed, match="is not signed"):
        policy.check_load(request, store)


def test_policy_rejects_uploaded_profiler(asked):
    _, policy = asked
    policy.check_profile("")
    with pytest.raises(RunFailed, match="not signed"):
        policy.check_profile("blake3:" + "0" * 64)


def test_agent_fails_without_readable_trusted_keys(tmp_path):
    (tmp_path / "none.pub").write_text("# nobody\n")
    for path, message in {"missing.pub": "cannot be read", "none.pub": "contains no keys"}.items():
        command = [sys.executable, "-m", "hil.agent", "--listen", f"unix:{tmp_path}/a.sock", "--store", tmp_path / "s"]
        done = subprocess.run([*command, "--trusted-keys", tmp_path / path], capture_output=True, text=True)
        assert done.returncode == 2
        assert message in done.stderr and "Traceback" not in done.stderr
