"""Build the documentation site: the guides, and reference pages from commands, protocol files and docstrings.

    python -m tools.build_site [--serve] [DIR]

Writes DIR/site (build/site). Warnings, such as a link to a missing page or heading, are errors. Zensical checks the
links between pages. This module checks the links to other files.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomlkit

from hil.controller.cli.main import cli
from tools.site_reference import API, describe_api, describe_commands, describe_protocol

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "benchmarks/README.md")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def copy_pages(target: Path) -> list[Path]:
    """Copy pages, images and linked files to the same paths below ``target``. Return the paths of the pages.

    Raises:
        SystemExit: a page links to a missing file.
    """
    names = [ROOT / name for name in PAGES if (ROOT / name).exists()]
    pages = [*names, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("README.md"))]
    for page in pages:
        _copy(page, target)
        for link in _LINK.findall(_remove_code(page.read_text())):
            if "://" in link or link.startswith("mailto:"):
                continue
            file = (page.parent / link).resolve()
            if not file.is_file() or ROOT not in file.parents:
                raise SystemExit(f"{page.relative_to(ROOT)}: link to a missing file: {link}")
            if file.suffix != ".md":
                _copy(file, target)
    return [page.relative_to(ROOT) for page in pages]


def write_reference(target: Path) -> dict[str, str]:
    """Write the reference pages. Return their titles and paths."""
    pages = {"Commands": ("commands.md", describe_commands(cli))}
    for proto in sorted((ROOT / "protos/hil/v1").glob("*.proto")):
        pages[f"Protocol: {proto.name}"] = (f"protocol-{proto.stem}.md", describe_protocol(proto))
    for module, title in API.items():
        pages[f"Python: {module}"] = (f"python-{module.replace('.', '-')}.md", describe_api(module, title))
    (target / "reference").mkdir()
    for name, text in pages.values():
        (target / "reference" / name).write_text(text)
    return {title: f"reference/{name}" for title, (name, _) in pages.items()}


def make_navigation(readme: str, reference: dict[str, str], pages: list[Path]) -> list[dict[str, Any]]:
    """Return the site's navigation: the guides in the README's order, then the reference, then other pages.

    Raises:
        SystemExit: a page under docs/ has no link in the README's list of guides.
    """
    guides = readme.split("\n## Guides\n", 1)[1].split("\n## ", 1)[0]
    sections: list[dict[str, Any]] = [{"Home": "README.md"}]
    listed = set()
    entries: list[dict[str, str]] = []
    for title, label, path in re.findall(r"^\*\*([^*]+)\*\*$|\[([^\]]+)\]\(([^)#]+\.md)\)", guides, re.M):
        if title:
            sections.append({title: (entries := [])})
        elif path not in listed:
            entries.append({label[0].upper() + label[1:]: path})
            listed.add(path)
    internals = [str(page) for page in pages if page.parts[:2] == ("docs", "internals")]
    if missing := {str(page) for page in pages if page.parts[0] == "docs"} - listed - set(internals):
        raise SystemExit(f"README.md does not list these guides: {', '.join(sorted(missing))}")
    rest = [str(page) for page in pages if str(page) not in {*listed, *internals, "README.md"}]
    sections.append({"Reference": [{title: path} for title, path in reference.items()]})
    sections.append({"Internals": [path for path in internals if path not in listed]})
    sections.append({"Project": rest})
    return sections


def write_config(path: Path, navigation: list[dict[str, Any]]) -> None:
    """Write Zensical's configuration."""
    markdown: dict[str, Any] = {
        name: {} for name in ("tables", "admonition", "attr_list", "md_in_html", "pymdownx.superfences")
    }
    options = {
        "docstring_style": "google",
        "show_source": False,
        "show_root_heading": True,
        "heading_level": 2,
        "filters": ["!^_"],
        "extensions": [{str(ROOT / "tools/docstring_roles.py"): {}}],
    }
    project = {
        "site_name": "hil",
        "site_description": "Run compiled models on boards, and compare the outputs with a CPU reference.",
        "docs_dir": "site-pages",
        "site_dir": "site",
        "nav": navigation,
        "theme": {"features": ["navigation.tabs", "navigation.sections", "content.code.copy", "search.highlight"]},
        "markdown_extensions": {**markdown, "toc": {"permalink": True}},
        "plugins": {
            "search": {},
            "mkdocstrings": {"handlers": {"python": {"paths": [str(ROOT)], "options": options}}},
        },
    }
    path.write_text(tomlkit.dumps({"project": project}))


def prepare_site(build: Path) -> None:
    """Write the pages and Zensical's configuration to a directory."""
    target = build / "site-pages"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    pages = copy_pages(target)
    reference = write_reference(target)
    write_config(build / "zensical.toml", make_navigation((ROOT / "README.md").read_text(), reference, pages))


def main(arguments: list[str]) -> int:
    """Build the site, or serve it. Return Zensical's exit code."""
    serves = "--serve" in arguments
    build = Path(next((one for one in arguments if one != "--serve"), ROOT / "build"))
    prepare_site(build)
    command = ["serve"] if serves else ["build", "--strict", "--clean"]
    return subprocess.run([sys.executable, "-m", "zensical", *command], cwd=build).returncode


def _remove_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)


def _copy(file: Path, target: Path) -> None:
    place = target / file.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, place)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
