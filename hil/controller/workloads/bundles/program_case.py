"""Test cases bundled with a compiled program and expected outputs.

Such cases need neither a compiler nor a reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hil.bundles import Bundle, Method
from hil.bundles.cases import BUNDLE_FORMAT, BundledCase
from hil.bundles.manifest import read_program_files
from hil.bundles.signature import read_public_keys, verify
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.settings.model_settings import apply_model_settings
from hil.controller.pipeline.settings.options import Options
from hil.controller.storage.cache import Cache
from hil.core.results import Artifact, Model, RunResult, Stage
from hil.errors import ReferenceFailed

_NO_MODEL = "the case contains a compiled program and expected outputs, but no model for a reference"


def open_bundle(path: Path, key: Path | None = None) -> Bundle:
    """Open a bundle and verify the signature, if present.

    Args:
        key: a file of public keys. One of these keys must have signed the bundle. None accepts any or no signature.

    Raises:
        UsageError: see :meth:`Bundle.open`; or the signature is invalid or from a different key.
    """
    bundle = Bundle.open(path)
    if key is not None or bundle.head.signature:
        verify(bundle.head, read_public_keys(key) if key is not None else None)
    return bundle


@dataclass(frozen=True)
class ProgramCase:
    """A case of a bundle, with the bundle's program."""

    path: Path
    digest: str
    method: Method
    given: BundledCase
    artifact: Artifact
    random: Mapping[str, Sequence[str]] = field(default_factory=dict)  # ``nodes`` and ``outputs``, if any

    def begin(self, options: Options, folder: Path, name: str = "") -> Case:
        """Return the case for the pipeline, before the push.

        Args:
            options: run settings. Their tolerances override the tolerances of the case.
            name: the case's name; "" combines the method's and the bundled case's.
        """
        given, method, signature = self.given, self.method, self.method.signature
        options = apply_model_settings(options, self.path)
        options = replace(
            options,
            runtime=self.artifact.runtime,
            function=method.name,
            rtol=given.rtol if options.rtol is None else options.rtol,
            atol=given.atol if options.atol is None else options.atol,
            accept=options.accept or given.accept,
        )
        files = {self.path.name: self.path}
        takes, gives = signature.inputs, signature.outputs
        return Case(
            name or f"{method.name}-{given.name}",
            self.path,
            options,
            folder,
            model=Model(
                self.path.stem,
                BUNDLE_FORMAT,
                self.path,
                files,
                self.digest,
                method.name,
                takes,
                gives,
                producer={"random": self.random},
            ),
            artifact=replace(self.artifact, function=method.name, inputs=takes, outputs=gives),
            signature=signature,
            inputs=given.inputs,
            references=(
                RunResult(
                    given.source or "expected",
                    given.expected_outputs,
                    noise=given.noise,
                    relation=given.relation,
                    control=given.control,
                ),
            ),
            unanswered={name: ReferenceFailed(_NO_MODEL, stage=Stage.REFER.value) for name in options.references},
        )


def extract_program(bundle: Bundle, cache: Cache) -> Artifact:
    """Extract a bundle's program to the cache. Cases with the same program share the files."""
    digests, *_ = read_program_files(bundle.head.parse_document())
    key = Cache.key("bundle-program", digests=dict(digests))

    def make(folder: Path) -> None:
        (folder / "program").mkdir()
        bundle.extract(folder / "program")

    entry, _ = cache.get_or_make(key, {"model": bundle.program.main}, make)
    return bundle.program_at(entry / "program")
