"""The documentation site: generated pages, navigation, and the whole build."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

pytest.importorskip("zensical", reason="the site's tools need Python 3.11")

from tools import build_site
from tools.site_reference import API, describe_api, describe_commands, describe_protocol

ROOT = Path(__file__).parents[3]
PROTO = """// A test protocol.
//
// Second paragraph.
syntax = "proto3";
package hil.v1;
// Greets.
service Greeter {
  // Says <hello> | good morning.
  rpc Greet(stream Name) returns (Reply);
}
message Name {
  string first = 1;
  // One per title.
  repeated string titles = 2;
  map<string, int64> ages = 3;
  optional Kind kind = 4;
  enum Kind {
    UNKNOWN = 0;
    // A person.
    PERSON = 1;
  }
}
message Reply {}
"""


@pytest.fixture
def protocol_page(tmp_path: Path) -> str:
    proto = tmp_path / "hil/v1/greet.proto"
    proto.parent.mkdir(parents=True)
    proto.write_text(PROTO)
    return describe_protocol(proto)


def test_protocol_page_lists_calls_with_comments(protocol_page: str):
    assert "A test protocol.\n\nSecond paragraph." in protocol_page
    assert "## Greeter\n\nGreets." in protocol_page
    assert "| `Greet` | stream Name | Reply | Says &lt;hello> \\| good morning. |" in protocol_page


def test_protocol_page_lists_fields_and_enums(protocol_page: str):
    assert "| 1 | `first` | string |  |" in protocol_page
    assert "| 2 | `titles` | repeated string | One per title. |" in protocol_page
    assert "| 3 | `ages` | map |  |" in protocol_page
    assert "| 4 | `kind` | optional Name.Kind |  |" in protocol_page
    assert "## Name.Kind" in protocol_page
    assert "| 1 | `PERSON` | A person. |" in protocol_page
    assert "AgesEntry" not in protocol_page
    assert "## Reply\n\nThis message has no fields." in protocol_page


def test_command_page_has_help_of_nested_commands():
    @click.group()
    def cli() -> None:
        pass

    @cli.group()
    def board() -> None:
        pass

    @board.command(help="Measure the round trip.")
    @click.option("--count", help="Number of pings.")
    def ping(count: str) -> None:
        pass

    page = describe_commands(cli)
    assert re.findall("^## (.*)$", page, re.M) == ["hil", "hil board", "hil board ping"]
    assert "Measure the round trip." in page
    assert "--count TEXT  Number of pings." in page


@pytest.mark.parametrize("module", API)
def test_api_page_lists_public_names(module: str):
    names = re.findall(rf"^::: {module}\.(\w+)$", describe_api(module, "Title"), re.M)
    assert names
    assert not [name for name in names if name.startswith("_")]


def test_navigation_rejects_guide_missing_from_readme():
    readme = "# hil\n\n## Guides\n\n**Run**\n\n| [Running](docs/running.md) |\n\n## Licence\n"
    pages = [Path("docs/running.md"), Path("SECURITY.md"), Path("docs/internals/limits.md")]
    navigation = build_site.make_navigation(readme, {"Commands": "reference/commands.md"}, pages)
    assert navigation == [
        {"Home": "README.md"},
        {"Run": [{"Running": "docs/running.md"}]},
        {"Reference": [{"Commands": "reference/commands.md"}]},
        {"Internals": ["docs/internals/limits.md"]},
        {"Project": ["SECURITY.md"]},
    ]
    with pytest.raises(SystemExit, match=r"does not list these guides: docs/new\.md"):
        build_site.make_navigation(readme, {}, [*pages, Path("docs/new.md")])


def test_link_to_missing_file_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text("See `[x](code.md)` and [the proto](../protos/gone.proto).\n")
    monkeypatch.setattr(build_site, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"docs/a\.md: link to a missing file: \.\./protos/gone\.proto"):
        build_site.copy_pages(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(600)
def test_site_builds_without_warnings(tmp_path: Path):
    command = [sys.executable, "-m", "tools.build_site", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    output = built.stdout + built.stderr
    assert built.returncode == 0, output
    assert "No issues found" in output
    assert not re.search(r"warning|griffe", output, re.I), output
    site = tmp_path / "site"
    assert "hil board ping" in (site / "reference/commands/index.html").read_text()
    assert "InvokeStart" in (site / "reference/protocol-agent/index.html").read_text()
    assert "REFERENCE_ERROR" in (site / "search.json").read_text()
    api = (site / "reference/python-hil-errors/index.html").read_text()
    assert "BoardLost" in api
    assert ":class:" not in api
