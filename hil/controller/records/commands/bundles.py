"""Documents of `hil bundle` and `python -m hil.agent verify`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from hil.controller.records.base import Count, Record, note
from hil.controller.records.outputs import DType, Placement, Shape, StoredComparison
from hil.controller.records.run import StoredSpec
from hil.core.results import Outcome, Relation

Signer = Annotated[str, note("fingerprint of the ed25519 key, as ssh-keygen -l shows it; empty if not signed")]


class FileDescription(Record, kw_only=True):
    """A file of a bundled program."""

    name: str
    bytes: Count
    digest: str


class ProgramDescription(Record, kw_only=True):
    """The program of a bundle."""

    runtime: str
    main: Annotated[str, note("file that the runtime opens")]
    compiler: str
    flags: list[str]
    files: Annotated[list[FileDescription], Meta(min_length=1)]


class TensorDescription(Record, kw_only=True):
    """A tensor of a bundled case."""

    name: str
    dtype: DType
    shape: Shape
    bytes: Count
    digest: str


class CaseDescription(Record, kw_only=True):
    """A case of a bundle."""

    name: str
    source: Annotated[str, note("name of the reference that computed the expected outputs")]
    rtol: Annotated[float | None, note("null: the default of the dtype")]
    atol: float | None
    accept: Annotated[list[str], note("criteria that replace the tolerance, or empty")]
    inputs: list[TensorDescription]
    outputs: Annotated[list[TensorDescription], note("expected outputs", min_length=1)]


class MethodDescription(Record, kw_only=True):
    """An entry point of a bundled program."""

    name: str
    inputs: list[StoredSpec]
    outputs: list[StoredSpec]
    cases: list[CaseDescription]


class BundleDescription(Record, kw_only=True):
    """Output of `hil bundle create`, `import` and `inspect`: contents of a bundle."""

    path: str
    bytes: Count
    digest: Annotated[str, note("digest of the manifest, which contains all other digests")]
    signed_by: Signer
    program: ProgramDescription
    methods: Annotated[list[MethodDescription], Meta(min_length=1)]
    made: Annotated[dict[str, Any], note("model, target and tools that made the bundle")]
    exit_code: Literal[0]


class VerifiedBundle(Record, kw_only=True):
    """Output of `hil bundle verify`."""

    bundle: str
    digest: str
    signed_by: Signer
    trusted: Annotated[bool, note("true if --key was given, and one of its keys made the signature")]
    methods: Annotated[int, Meta(ge=1)]
    cases: Count
    exit_code: Literal[0]


class ExtractedProgram(Record, kw_only=True):
    """Output of `hil bundle extract`."""

    folder: str
    runtime: str
    main: Annotated[str, note("file that the runtime opens")]
    files: Annotated[dict[str, Count], note("size by name")]
    methods: list[str]
    exit_code: Literal[0]


class ExportedBundle(Record, kw_only=True):
    """Output of `hil bundle export`."""

    path: str
    format: str
    cases: Count
    exit_code: Literal[0]


class BuiltVerifier(Record, kw_only=True):
    """Output of `hil bundle verifier`."""

    path: str
    target: str
    bytes: Count
    exit_code: Literal[0]


class VerifyMachine(Record, kw_only=True):
    """Machine that verified a bundle."""

    hostname: str
    arch: str


class VerifyError(Record, kw_only=True):
    """Error of a case."""

    kind: Annotated[str, note("a class of hil/errors.py")]
    hint: str
    detail: str


class VerifiedCase(Record, kw_only=True):
    """Result of a bundled case."""

    method: str
    case: str
    outcome: Outcome
    reason: str
    against: Annotated[str | None, note("name of the reference; null if nothing was compared")]
    relation: Relation | None
    device_ns: Annotated[int | None, note("on the clock of the board")]
    outputs: list[StoredComparison]
    placement: Placement
    elsewhere: Annotated[str, note("parts that ran on a device that was not requested, or empty")]
    error: VerifyError | None


class VerifyReport(Record, kw_only=True):
    """Output of `python -m hil.agent verify`, which the agent writes without these types."""

    bundle: str
    digest: str
    signed_by: Annotated[str, note("trusted key; empty without --trusted-keys")]
    machine: VerifyMachine
    runtime: str
    cases: list[VerifiedCase]
    exit_code: int
