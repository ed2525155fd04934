"""Test cases that files bring with them, each with its compiled program: bundles, golden folders, flag files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hil.bundles import Bundle, Method
from hil.bundles.cases import BundledCase
from hil.bundles.signature import sealed
from hil.controller.pipeline.case import Workshop
from hil.controller.pipeline.flagfiles import parse_flagfile
from hil.controller.workloads.bundles.bpte import read_bpte
from hil.controller.workloads.bundles.case_files import INDEX, read_golden
from hil.controller.workloads.bundles.flagfile import case_name, read_flagfiles
from hil.controller.workloads.bundles.program_case import ProgramCase, open_bundle, stored_program
from hil.core.digest import digest_file, digest_of
from hil.core.files import MAX_TEXT_BYTES, read_file
from hil.errors import UsageError
from hil.formats.executorch_file import Damaged, is_bundle, mapped, read_cases, read_methods

BUNDLES = (".hilb", ".bpte")
GOLDEN = INDEX


@dataclass(frozen=True)
class OwnCase:
    """A case that a file brings with it.

    Attributes:
        name: unique in its file and the same in every run.
        content: digest of all that it is made from; "" where that cannot be read, then making it says so.
        make: makes it, with the case's own folder; raises UsageError where it cannot be read.
    """

    name: str
    content: str
    make: Callable[[Workshop, Path], ProgramCase]


def brings_cases(file: Path) -> bool:
    """Whether a file is one that may bring cases with it, by its name: a bundle, or the index of a golden folder."""
    return file.suffix.lower() in BUNDLES or is_golden(file)


def is_golden(file: Path) -> bool:
    """Whether a file is the index of a golden folder, as ``hil bundle export --to golden`` writes one."""
    return file.name == GOLDEN and (file.parent / "program").is_dir()


def cases_in(file: Path, shop: Workshop) -> list[OwnCase]:
    """Every case of every method of a bundle or a golden folder, in order; none of a ``.bpte`` that bundles none.

    Args:
        file: one that :func:`brings_cases`.
        shop: the cache and the isolated processes.

    Raises:
        UsageError: it cannot be read.
    """
    if is_golden(file):
        bundle = read_golden(file.parent, shop=shop)
    elif file.suffix.lower() == ".hilb":
        bundle = open_bundle(file)
    elif _has_cases(file):
        bundle = read_bpte(file, shop=shop)
    else:
        return []
    return list(_cases_of(file, bundle))


def cases_of_flagfiles(files: Sequence[Path], folder: Path) -> list[OwnCase]:
    """The cases of flag files of one program, one each.

    Args:
        files: the flag files, in the folder or below.
        folder: what the cases' names are relative to.
    """

    def make(file: Path, shop: Workshop, place: Path) -> ProgramCase:
        (own,) = _cases_of(file, read_flagfiles(file, shop=shop))
        return own.make(shop, place)

    return [OwnCase(case_name(file, folder), _content(file), functools.partial(make, file)) for file in files]


def by_program(flagfiles: Sequence[Path]) -> tuple[dict[Path, list[Path]], list[str]]:
    """Flag files by the program that they name, and of those that are no cases why, a line for each kind.

    A file that names no program, and so is none of IREE's tools', is passed over. One that hil cannot read stands by
    itself: its case says what is wrong.
    """
    programs: dict[Path, list[Path]] = {}
    silent = []
    for file in flagfiles:
        try:
            text = read_file(file, MAX_TEXT_BYTES).decode(errors="replace")
            if "--module=" not in text:
                continue
            if "--expected_output=" not in text:
                silent.append(file)
                continue
            program = parse_flagfile(file).modules[0].resolve()
        except (OSError, UsageError):
            program = file
        programs.setdefault(program, []).append(file)
    left_out = [f"{silent[0]}{_more(silent)}: nothing is expected, for there is no --expected_output"] if silent else []
    return programs, left_out


def _more(files: Sequence[Path]) -> str:
    return f" and {len(files) - 1} more flag files" if len(files) > 1 else ""


def files_of(flagfile: Path) -> list[Path]:
    """The flag file and every file that it names.

    Raises:
        UsageError: it is no flag file.
    """
    flags = parse_flagfile(flagfile)
    tensors = [text.partition("@")[2] for text in (*flags.inputs, *flags.expected)]
    return [flagfile, *flags.modules, *flags.parameters, *(Path(name) for name in tensors if name)]


def _cases_of(file: Path, bundle: Bundle) -> Iterator[OwnCase]:
    def make(method: Method, case: BundledCase, shop: Workshop, place: Path) -> ProgramCase:
        program = sealed(stored_program(bundle, shop.cache), bundle.head, place)
        return ProgramCase(file, bundle.digest, method, case, program)

    for method in bundle.methods:
        for case in method.cases:
            yield OwnCase(f"{method.name}_{case.name}", bundle.digest, functools.partial(make, method, case))


def _content(flagfile: Path) -> str:
    try:
        return digest_of("\n".join(digest_file(file) for file in files_of(flagfile)).encode())
    except (OSError, UsageError):
        return ""


def _has_cases(file: Path) -> bool:
    try:
        data = mapped(file)
        # Of a file whose program is damaged nobody can say that it bundles nothing.
        return is_bundle(data) and bool(read_methods(data)) and any(read_cases(data).values())
    except (OSError, Damaged) as error:
        raise UsageError(f"{file.name} cannot be read: {error}") from error
