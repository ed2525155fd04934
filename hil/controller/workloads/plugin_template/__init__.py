"""Create a package from a template, which is an example package: `hil new-plugin`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hil.controller.backends.references import load_references
from hil.core.config_files import parse_toml
from hil.core.files import read_text
from hil.core.runtimes import RUNTIMES
from hil.errors import StorageError, UsageError

_HERE = Path(__file__).parent
# Possible directories of the templates: in a wheel, and in a checkout.
_PLACES = (_HERE, _HERE.parents[3] / "examples")
_SUFFIXES = (".md", ".py", ".toml")
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
# Names of addresses and simulators, which are not names of runtimes or links.
_PREFIXES = ("farm", "hil", "local", "sim", "ssh", "unix")


@dataclass(frozen=True)
class PluginKind:
    """Kind of package: a template without some files and groups of entry points."""

    template: str  # name in the template; the package is ``hil-TEMPLATE``
    left_out: tuple[str, ...] = ()  # files and directories, relative to the template
    groups: tuple[str, ...] = ()


_NO_BOARD = ("hil_npx/boards", "hil_npx/link.py", "tests/test_board.py")
KINDS: Mapping[str, PluginKind] = MappingProxyType(
    {
        "board": PluginKind("npx"),
        "runtime": PluginKind("npx", _NO_BOARD, ("hil.links", "hil.board_configs")),
        "reference": PluginKind("plain-ort"),
    }
)


def create_package(name: str, kind: str, folder: Path) -> list[Path]:
    """Write a package to a new directory. Return the files.

    Args:
        name: name of the runtime or reference. The package is ``hil-NAME``.
        kind: key of :data:`KINDS`.

    Raises:
        UsageError: the name is invalid, or the directory exists and is not empty.
        StorageError: the directory cannot be written.
    """
    used = {*RUNTIMES, *load_references(), *_PREFIXES}
    if not _NAME.fullmatch(name) or name in used:
        why = "hil uses this name" if name in used else "expected lower-case letters, digits and single dashes"
        raise UsageError(f"invalid plugin name {name!r}: {why}", hint="for example: hil new-plugin acme")
    chosen = KINDS[kind]
    template = next(one for place in _PLACES if (one := place / f"hil-{chosen.template}").is_dir())
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} exists and is not an empty directory", hint="choose another directory with -o")
        written = [_write(template, path, name, chosen, folder) for path in _list_files(template, chosen.left_out)]
    except OSError as error:
        raise StorageError(f"cannot write to {folder}: {error.strerror or error}") from error
    return written


def _list_files(template: Path, left_out: tuple[str, ...]) -> list[Path]:
    skipped = [template / one for one in left_out]
    return [
        path
        for path in sorted(template.rglob("*"))
        if path.suffix in _SUFFIXES
        and path.is_file()
        and not any(path == one or one in path.parents for one in skipped)
        and not any(_is_generated(part) for part in path.relative_to(template).parts)
    ]


def _is_generated(name: str) -> bool:
    return name.startswith(".") or name in ("build", "__pycache__") or name.endswith(".egg-info")


def _write(template: Path, path: Path, name: str, kind: PluginKind, folder: Path) -> Path:
    text = read_text(path)
    if path.name == "pyproject.toml":
        text = _select_groups(text, path, kind)
    elif path.name == "README.md":
        text = _select_rows(text, kind)
    target = folder / rename(path.relative_to(template).as_posix(), kind.template, name)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(rename(text, kind.template, name))
    return target


def rename(text: str, old: str, new: str) -> str:
    """Replace a template's name in all its forms."""
    forms = dict(zip(_list_forms(old), _list_forms(new), strict=True))
    return re.sub("|".join(forms), lambda match: forms[match[0]], text)


def _list_forms(name: str) -> tuple[str, str, str, str]:
    """Return the forms of a name: module, class, text and entry point. The longest forms are first."""
    words = name.split("-")
    return f"hil_{'_'.join(words)}", "".join(map(str.capitalize, words)), name.upper(), name


def _select_groups(text: str, path: Path, kind: PluginKind) -> str:
    """Return pyproject.toml without the entry points and packages that the kind lacks."""
    for group in kind.groups:
        text = re.sub(rf'\[project\.entry-points\."{re.escape(group)}"\]\n(?:[^\[\n].*\n)+\n', "", text)
    if "hil_npx/boards" in kind.left_out:
        text = text.replace('packages = ["hil_npx", "hil_npx.boards"]', 'packages = ["hil_npx"]')
        text = re.sub(r"\[tool\.setuptools\.package-data\]\n.*\n\n", "", text)
    parse_toml(text, path)
    return text


def _select_rows(text: str, kind: PluginKind) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not any(f"`{one}`" in line for one in kind.left_out))
