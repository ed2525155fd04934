"""Names of modules and functions in docstrings, comments, tests and scripts exist: renames must change them too."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("hil", "tools", "support", "tests", "benchmarks")
IMPORT = re.compile(rf"^ *from ((?:{'|'.join(PACKAGES)})(?:\.\w+)*) import (\([^)]*\)|[^(\n]+)$", re.M)
ROLE = re.compile(r":(?:mod|func|class|data|attr|exc):`~?(hil\.[\w.]+)`")
# Names in tables of runtimes, compilers and importers, which hil imports on first use.
REFERENCE = re.compile(r"[\"'](hil(?:\.\w+)+:\w+)")
# References that tests use for missing modules, and modules of examples.
MISSING = ("hil.nothing", "hil.formats.nothing", "hil.agent.runtimes.toy:")
# Modules that protoc generates.
GENERATED = re.compile(r"hil\.protocol\.v1\b")


@functools.cache
def list_sources() -> list[Path]:
    """Return the Python files of the repository, also those without a suffix."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in done.stdout.split() if (ROOT / name).is_file()]
    scripts = [one for one in paths if one.suffix == "" and one.parent.name in ("scripts", "benchmarks", "tools")]
    return [
        *(one for one in paths if one.suffix == ".py"),
        *(one for one in scripts if "python" in one.read_text().partition("\n")[0]),
    ]


def find_file(module: str) -> Path | None:
    """Return the file of a module of this repository, or None."""
    for base in (ROOT, ROOT / "tests"):
        place = base / module.replace(".", "/")
        if place.with_suffix(".py").is_file():
            return place.with_suffix(".py")
        if place.is_dir():
            return place / "__init__.py"
    return None


@functools.cache
def read_words(path: Path) -> frozenset[str]:
    """Return the words of a file: a name that the file defines is one of them."""
    return frozenset(re.findall(r"\w+", path.read_text())) if path.is_file() else frozenset()


def exists(name: str) -> bool:
    """Return True if a dotted name is a module, or a name in a module."""
    if GENERATED.match(name) or find_file(name) is not None:
        return True
    module, _, last = name.rpartition(".")
    while "." in module or module in PACKAGES:
        if (path := find_file(module)) is not None:
            return last in read_words(path)
        module, _, last = module.rpartition(".")
    return False


def list_imports(text: str) -> Iterator[str]:
    """Yield the names that a program imports from this repository, also inside of functions."""
    for module, names in IMPORT.findall(text):
        yield from (
            f"{module}.{one.split()[0]}" for one in re.sub(r"#.*", "", names).strip("()").split(",") if one.strip()
        )


def test_imported_names_exist() -> None:
    found = [(path, name) for path in list_sources() for name in list_imports(path.read_text())]
    assert len(found) > 5000
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in found if not exists(name)] == []


def test_references_in_strings_exist() -> None:
    found = [(path, name) for path in list_sources() for name in REFERENCE.findall(path.read_text())]
    assert len(found) > 10
    names = [(path, name, name.replace(":", ".")) for path, name in found if not name.startswith(MISSING)]
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name, dotted in names if not exists(dotted)] == []


def test_imported_names_in_guides_exist() -> None:
    guides = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    found = [(path, name) for path in guides for name in list_imports(path.read_text())]
    assert len(found) > 20
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in found if not exists(name)] == []


def test_names_in_docstrings_exist() -> None:
    found = [(path, name) for path in list_sources() for name in ROLE.findall(path.read_text())]
    assert len(found) > 50
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in found if not exists(name)] == []


def test_list_imports_finds_imports_in_functions() -> None:
    text = "from hil.core import (\n    a,  # why\n    b as c,\n)\n"
    text += "def f():\n    from tools.x import y, z\nfrom numpy import q\n"
    assert list(list_imports(text)) == ["hil.core.a", "hil.core.b", "tools.x.y", "tools.x.z"]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("hil.errors", True),
        ("hil.errors.UsageError", True),
        ("hil.errors.UsageError.hint", True),
        ("hil.errors.NoSuchError", False),
        ("hil.no_such_module.name", False),
    ],
)
def test_exists_finds_modules_and_names(name: str, known: bool) -> None:
    assert exists(name) == known
