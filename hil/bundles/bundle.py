"""A bundle: made of a program and test cases, written, opened, and its program taken out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hil.bundles import layout
from hil.bundles.cases import Method, MethodTestCase, MethodTestSuite, Program, Signature
from hil.bundles.checks import checked_cases
from hil.bundles.layout import Head
from hil.bundles.manifest import blob_table, from_document, program_files, to_document
from hil.bundles.signature import sign
from hil.core.digest import algorithm_of, digest_file
from hil.core.files import replacing
from hil.core.results import Artifact
from hil.errors import StorageError, UsageError, did_you_mean
from hil.formats.executorch_file import Damaged, mapped, read_methods


@dataclass(frozen=True)
class Bundle:
    """A program, its methods and their test cases. Make one with :meth:`create`, read one with :meth:`open`."""

    program: Program
    methods: tuple[Method, ...]  # every entry point that the bundle knows, those without cases too
    # how it was made, as JSON: model, target, versions of tools. For the record: nothing goes by it.
    made: Mapping[str, Any]
    head: Head  # header and manifest; of one that was opened they are the file's own
    _blobs: Mapping[str, memoryview] = field(repr=False, default_factory=dict)

    @classmethod
    def create(
        cls,
        program: Artifact,
        suites: Iterable[MethodTestSuite],
        *,
        signatures: Mapping[str, Signature] | None = None,
        made: Mapping[str, Any] | None = None,
    ) -> Bundle:
        """Put a program and its test cases together, once every case is seen to fit.

        Args:
            suites: cases by method; a method may have several suites, or none.
            signatures: what each method of the program takes and gives; None is what the program says of all of its
                methods, where it was extracted from a bundle or is ExecuTorch's, else of its function.
            made: how it was made, as JSON; equal bundles have equal bytes, so nothing that changes by itself.

        Raises:
            UsageError: there is no such method, a case does not fit it (count, name, dtype or shape of a tensor, a
                dynamic dimension with two sizes), a tolerance cannot fail, there is no case at all, or only a board can
                tell the signature.
        """
        known = dict(signatures) if signatures is not None else _own_signatures(program)
        by_method: dict[str, list[MethodTestCase]] = {name: [] for name in known}
        for suite in suites:
            if suite.method_name not in by_method:
                raise _no_method("program", suite.method_name, known)
            by_method[suite.method_name] += suite.test_cases
        if not any(by_method.values()):
            raise UsageError("a bundle without any case verifies nothing", hint="give it at least one")
        methods = tuple(
            Method(name, known[name], checked_cases(name, known[name], cases)) for name, cases in by_method.items()
        )
        files = {name: _mapped(path) for name, path in sorted(program.files.items())}
        content = Program(program.runtime, program.main, files, program.compiler, tuple(program.flags))
        document, blobs = to_document(content, methods, made or {})
        text = layout.canonical_json(document)
        if len(text) > layout.MAX_MANIFEST_BYTES:
            raise UsageError(
                f"the manifest has {len(text)} bytes, {layout.MAX_MANIFEST_BYTES} are allowed", hint="fewer cases"
            )
        head = Head(0, text)
        size = head.data_offset + sum(layout.aligned(blob.nbytes) for blob in blobs.values())
        if size > layout.MAX_FILE_BYTES:
            raise UsageError(f"the bundle has {size} bytes, {layout.MAX_FILE_BYTES} are allowed", hint="fewer cases")
        # Read as every reader will: what could not be opened again is refused now.
        return cls._read(Head(size, text), blobs)

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """Open a bundle: memory-mapped, every part looked at before anything of it is believed.

        A signature is not checked: see :func:`hil.bundles.signature.verify`.

        Raises:
            UsageError: there is no such file, it is no bundle, damaged, or says what cannot be.
        """
        try:
            view = layout.map_file(Path(path))
            head = layout.read_head(view)
            table = blob_table(head.document())
            blobs = layout.split(view, head, table)
            return cls._read(head, {digest: blob for (digest, _), blob in zip(table, blobs, strict=True)})
        except UsageError as error:
            error.args = (f"{path}: {error.message}" if str(path) not in error.message else error.message,)
            raise

    @classmethod
    def _read(cls, head: Head, blobs: Mapping[str, memoryview]) -> Bundle:
        program, read, made = from_document(head.document(), blobs)
        methods = (
            Method(suite.method_name, signature, checked_cases(suite.method_name, signature, suite.test_cases))
            for signature, suite in read
        )
        return cls(program, tuple(methods), MappingProxyType(made), head, MappingProxyType(dict(blobs)))

    def save(self, path: Path, *, key: Path | None = None) -> Head:
        """Write the file, whole or not at all; the same bundle gives the same bytes.

        Args:
            key: file of the private ed25519 key to sign it with; None leaves it as it is.

        Returns:
            Header and manifest as they were written.

        Raises:
            UsageError: the key cannot be used.
            StorageError: the file cannot be written.
        """
        head = sign(self.head, key) if key else self.head
        try:
            with replacing(path) as temporary, temporary.open("wb") as file:
                for piece in layout.pieces(head, list(self._blobs.values())):
                    file.write(piece)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}", hint="name another file") from error
        return head

    @property
    def digest(self) -> str:
        """What tells this bundle from every other, signed or not."""
        return self.head.digest

    def method(self, name: str) -> Method:
        """A method by name. Raises UsageError: there is none."""
        for method in self.methods:
            if method.name == name:
                return method
        raise _no_method("bundle", name, [method.name for method in self.methods])

    def extract(self, folder: Path) -> Artifact:
        """Write the program's files into a folder that is there and empty.

        What is returned knows all methods; its function is the first.

        Raises:
            StorageError: they cannot be written.
            UsageError: what was written is not what was checked when the bundle was opened: its file was changed.
        """
        program = self.program_at(folder)
        try:
            for name, path in program.files.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                # Never over what is there: two names may be one on this file system.
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(self.program.files[name])
                if digest_file(path, algorithm_of(program.digests[name])) != program.digests[name]:
                    raise UsageError("the bundle was changed while it was read", hint="try it again")
        except OSError as error:
            raise StorageError(f"{folder} cannot be written: {error.strerror}") from error
        return program

    def program_at(self, folder: Path) -> Artifact:
        """The program with its files in a folder that :meth:`extract` wrote."""
        digests, *_ = program_files(self.head.document())
        first = self.methods[0]
        return Artifact(
            runtime=self.program.runtime,
            main=self.program.main,
            files={name: folder / name for name in self.program.files},
            digests=digests,
            function=first.name,
            compiler=self.program.compiler,
            flags=self.program.flags,
            inputs=first.signature.inputs,
            outputs=first.signature.outputs,
            methods={one.name: (one.signature.inputs, one.signature.outputs) for one in self.methods},
        )


def _no_method(what: str, name: str, known: Iterable[str]) -> UsageError:
    hint = f"{did_you_mean(name, known)}it has {', '.join(known)}"
    return UsageError(f"the {what} has no method {name!r}", hint=hint)


def _own_signatures(program: Artifact) -> dict[str, Signature]:
    if program.methods:
        return {name: Signature(*sides) for name, sides in program.methods.items()}
    found = _of_executorch(program.files[program.main]) if program.runtime == "executorch" else {}
    if program.inputs is None or program.outputs is None:
        if found:
            return found
        raise UsageError(
            f"only a board can tell what {program.main} takes and gives",
            hint="name one, with --board; or give the signatures",
        )
    # The names of its tensors are the model's; the file has none.
    return found | {program.function or "main": Signature(tuple(program.inputs), tuple(program.outputs))}


def _of_executorch(main: Path) -> dict[str, Signature]:
    """The methods of a .pte that take and give tensors; none of a file that cannot be read."""
    found = {}
    with contextlib.suppress(Damaged, OSError):
        for name, method in read_methods(mapped(main)).items():
            with contextlib.suppress(Damaged):  # it takes or gives what is no tensor
                inputs, outputs = method.input_specs(), method.output_specs()
                found[name] = Signature(tuple(spec for _, spec in inputs), tuple(spec for _, spec in outputs))
    return found


def _mapped(path: Path) -> memoryview:
    if path.stat().st_size == 0:
        return memoryview(b"")
    with contextlib.suppress(UsageError):
        return layout.map_file(path)
    raise UsageError(f"the program's file {path} cannot be read")
