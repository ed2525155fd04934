"""Create, write and open bundles, and extract their programs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hil.bundles import layout
from hil.bundles.cases import BundleProgram, Method, MethodTestCase, MethodTestSuite, Signature
from hil.bundles.checks import check_cases
from hil.bundles.layout import Head
from hil.bundles.manifest import from_document, read_blob_table, read_program_files, to_document
from hil.bundles.signature import sign
from hil.core.files import load_file, replace_file
from hil.core.results import Artifact
from hil.errors import StorageError, UnreadableFile, UsageError, did_you_mean
from hil.formats.executorch_file import Damaged, read_buffer, read_methods


@dataclass(frozen=True)
class Bundle:
    """Program with its methods and test cases. :meth:`create` builds a bundle; :meth:`open` reads a file."""

    program: BundleProgram
    methods: tuple[Method, ...]  # all known entry points, also entry points without cases
    # Creation record, as JSON: model, target, tool versions. Informational only.
    made: Mapping[str, Any]
    head: Head  # header and manifest, from the file if it was opened
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
        """Combine a program and the test cases, after checking that every case matches its method.

        Args:
            suites: cases by method; a method may have multiple suites or none.
            signatures: signature of each method. By default, a program from a bundle or for ExecuTorch has all its
                methods; another program has only its function.
            made: creation record, as JSON. Equal bundles have equal bytes, so leave out times.

        Raises:
            UsageError: a method does not exist, the signature is known only to a board, no case is given, or a
                tolerance cannot fail. Also if a case does not match its method: the count, name, dtype or shape of a
                tensor differs, or a dynamic dimension has two sizes.
        """
        known = dict(signatures) if signatures is not None else _own_signatures(program)
        by_method: dict[str, list[MethodTestCase]] = {name: [] for name in known}
        for suite in suites:
            if suite.method_name not in by_method:
                raise _make_method_error("program", suite.method_name, known)
            by_method[suite.method_name] += suite.test_cases
        if not any(by_method.values()):
            raise UsageError("the bundle has no test cases", hint="add a case")
        methods = tuple(
            Method(name, known[name], check_cases(name, known[name], cases)) for name, cases in by_method.items()
        )
        files = {name: load_file(path) for name, path in sorted(program.files.items())}
        content = BundleProgram(program.runtime, program.main, files, program.compiler, tuple(program.flags))
        document, blobs = to_document(content, methods, made or {})
        try:
            text = layout.encode_canonical_json(document)
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError(f"cannot store the bundle's metadata as JSON: {error}") from error
        if len(text) > layout.MAX_MANIFEST_BYTES:
            raise UsageError(
                f"the manifest has {len(text)} bytes, at most {layout.MAX_MANIFEST_BYTES} are allowed",
                hint="use fewer cases",
            )
        head = Head(0, text)
        size = head.data_offset + sum(layout.align_offset(blob.nbytes) for blob in blobs.values())
        if size > layout.MAX_FILE_BYTES:
            raise UsageError(
                f"the bundle has {size} bytes, at most {layout.MAX_FILE_BYTES} are allowed", hint="use fewer cases"
            )
        # Parse the result as a reader does, so that an unreadable bundle is an error here.
        return cls._read(Head(size, text), blobs)

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """Read a bundle into memory, and validate all parts before use.

        Signatures are not checked: see :func:`hil.bundles.signature.verify`.

        Raises:
            UsageError: the file is missing, not a bundle, damaged, or has invalid content.
            UnreadableFile: the file cannot be read, or was truncated during the read.
        """
        path = Path(path)
        with layout.open_reader(path) as reader:
            try:
                head = layout.read_head(reader.read(0, min(reader.size, layout.MAX_HEAD_BYTES)))
                return cls._read(head, layout.read_blobs(reader, head, read_blob_table(head.parse_document())))
            except UnreadableFile:
                raise  # the message contains the path
            except UsageError as error:
                error.args = (f"{path}: {error.message}",)
                raise

    @classmethod
    def _read(cls, head: Head, blobs: Mapping[str, memoryview]) -> Bundle:
        program, read, made = from_document(head.parse_document(), layout.CaseBlobs(blobs, head.size))
        methods = (
            Method(suite.method_name, signature, check_cases(suite.method_name, signature, suite.test_cases))
            for signature, suite in read
        )
        return cls(program, tuple(methods), MappingProxyType(made), head, MappingProxyType(dict(blobs)))

    def save(self, path: Path, *, key: Path | None = None) -> Head:
        """Write the file atomically. The same bundle always gives the same bytes.

        Args:
            key: file with a private ed25519 key to sign with; None leaves the signature unchanged.

        Returns:
            Header and manifest as written.

        Raises:
            UsageError: the key is invalid.
            StorageError: the file cannot be written.
        """
        head = sign(self.head, key) if key else self.head
        try:
            with replace_file(path) as temporary, temporary.open("wb") as file:
                for piece in layout.iter_pieces(head, list(self._blobs.values())):
                    file.write(piece)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}", hint="use a different file") from error
        return head

    @property
    def digest(self) -> str:
        """Digest that identifies the bundle, independent of its signature."""
        return self.head.digest

    def method(self, name: str) -> Method:
        """Return a method by name. Raises UsageError if missing."""
        for method in self.methods:
            if method.name == name:
                return method
        raise _make_method_error("bundle", name, [method.name for method in self.methods])

    def extract(self, folder: Path) -> Artifact:
        """Write the program's files to an existing empty directory.

        The returned artifact has all methods; its ``function`` is the first method.

        Raises:
            StorageError: the files cannot be written.
        """
        program = self.program_at(folder)
        try:
            for name, path in program.files.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                # Never overwrite a file: on this file system, two names may refer to the same file.
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(self.program.files[name])
        except OSError as error:
            raise StorageError(f"{folder} cannot be written: {error.strerror}") from error
        return program

    def program_at(self, folder: Path) -> Artifact:
        """Return the program with the paths of the files that :meth:`extract` wrote to ``folder``."""
        digests, *_ = read_program_files(self.head.parse_document())
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


def _make_method_error(what: str, name: str, known: Iterable[str]) -> UsageError:
    hint = f"{did_you_mean(name, known)}methods: {', '.join(known)}"
    return UsageError(f"the {what} has no method {name!r}", hint=hint)


def _own_signatures(program: Artifact) -> dict[str, Signature]:
    if program.methods:
        return {name: Signature(*sides) for name, sides in program.methods.items()}
    found = _read_executorch_methods(program.files[program.main]) if program.runtime == "executorch" else {}
    if program.inputs is None or program.outputs is None:
        if found:
            return found
        raise UsageError(
            f"only a board can determine the inputs and outputs of {program.main}",
            hint="select a board with --board; in Python, pass `signatures` to Bundle.create",
        )
    # The program file has no tensor names, so use the names from the model.
    return found | {program.function or "main": Signature(tuple(program.inputs), tuple(program.outputs))}


def _read_executorch_methods(main: Path) -> dict[str, Signature]:
    """Return the methods of a .pte whose inputs and outputs are all tensors. Return {} if the file cannot be read."""
    found = {}
    with contextlib.suppress(Damaged, OSError):
        for name, method in read_methods(read_buffer(main)).items():
            with contextlib.suppress(Damaged):  # an input or output is not a tensor
                inputs, outputs = method.list_input_specs(), method.list_output_specs()
                found[name] = Signature(tuple(spec for _, spec in inputs), tuple(spec for _, spec in outputs))
    return found
