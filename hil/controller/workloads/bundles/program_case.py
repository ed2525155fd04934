"""Test cases that come with their compiled program: nothing is left to compile, and no reference is left to ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hil.bundles import Bundle, Method
from hil.bundles.cases import BundledCase
from hil.bundles.manifest import program_files
from hil.bundles.signature import public_keys, verify
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.model_settings import for_model
from hil.controller.pipeline.options import Options
from hil.controller.storage.cache import Cache
from hil.core.results import Artifact, Model, RunResult, Stage
from hil.errors import ReferenceFailed

_NO_MODEL = "the case came with a compiled program and what it expects, and no model that a reference could run"


def open_bundle(path: Path, key: Path | None = None) -> Bundle:
    """A bundle whose signature, where it has one, is right.

    Args:
        key: a file of public keys, one of which must have signed it; None takes any signature, or none.

    Raises:
        UsageError: as :meth:`Bundle.open`, or the signature is wrong, or not one of those keys'.
    """
    bundle = Bundle.open(path)
    if key is not None or bundle.head.signature:
        verify(bundle.head, public_keys(key) if key is not None else None)
    return bundle


@dataclass(frozen=True)
class ProgramCase:
    """A case of a bundle, with the bundle's program."""

    path: Path
    digest: str
    method: Method
    given: BundledCase
    artifact: Artifact
    random: Mapping[str, Sequence[str]] = field(default_factory=dict)  # ``nodes`` and ``outputs``, where there are any

    def begin(self, options: Options, folder: Path, name: str = "") -> Case:
        """The case as the pipeline takes it, before anything was pushed.

        Args:
            options: how to run it; tolerances go before the case's own.
            name: the case's; "" is the method's and the bundled case's.
        """
        given, method, signature = self.given, self.method, self.method.signature
        options = for_model(options, self.path)
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
                "hilb",
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


def stored_program(bundle: Bundle, cache: Cache) -> Artifact:
    """A bundle's program, its files in the cache: cases that have one program share them."""
    digests, *_ = program_files(bundle.head.document())
    key = Cache.key("bundle-program", digests=dict(digests))

    def make(folder: Path) -> None:
        (folder / "program").mkdir()
        bundle.extract(folder / "program")

    entry, _ = cache.get_or_make(key, {"model": bundle.program.main}, make)
    return bundle.program_at(entry / "program")
