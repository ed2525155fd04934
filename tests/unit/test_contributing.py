"""The contributing guide refers to existing directories and files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "contributing.md").read_text()
RECIPES = "".join((ROOT / "docs/internals" / name).read_text() for name in ("adding.md", "adding-pages.md"))


def folders(place: Path) -> set[str]:
    return {path.name for path in place.iterdir() if (path / "__init__.py").exists()}


def test_contributing_guide_lists_every_package() -> None:
    of_hil, _, of_controller = GUIDE.partition("Inside the controller:")
    assert set(re.findall(r"`hil/(\w+)`", of_hil)) == folders(ROOT / "hil")
    assert set(re.findall(r"^\| `(\w+)` \|", of_controller, re.M)) == folders(ROOT / "hil" / "controller")


def test_contributing_guide_refers_to_existing_paths() -> None:
    named = {
        name
        for name in re.findall(r"`((?:hil|tests|scripts|docs|protos)/[\w./-]+)`", GUIDE + RECIPES)
        if "NAME" not in name
    }
    assert named and {name for name in named if not (ROOT / name).exists()} == set()
    inside = set(re.findall(r"`((?:models|backends|pipeline|devices|storage)/[\w./-]+)`", GUIDE))
    places = {name: ROOT / "hil" / "controller" / name for name in inside}
    assert {
        name for name, place in places.items() if not (place.exists() or place.with_suffix(".py").exists())
    } == set()
