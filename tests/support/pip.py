"""Replacement for `pip install -e PACKAGE` in tests of the guides: python pip.py PACKAGE SITE. Nothing imports this
script.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def install(package: Path, site: Path) -> None:
    """Write the files of `pip install -e PACKAGE` that entry points and imports need."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in points.items())])
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n\n".join(groups))
    for module in (*package.glob("*.py"), *(path.parent for path in package.glob("*/__init__.py"))):
        (site / module.name).symlink_to(module.resolve())


if __name__ == "__main__":
    install(Path(sys.argv[1]), Path(sys.argv[2]))
    print("installed")
