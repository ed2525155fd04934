"""Pages show the energy of cases with its interval."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.testclient import TestClient
from support.web import asking, write_record, write_run

INTERVAL = {"low": 0.9, "high": 1.1, "level": 0.99}
ENERGY: dict[str, Any] = {
    "meter": "simulated",
    "average_w": 5.0,
    "above_idle_w": 3.0,
    "peak_w": 5.5,
    "idle_w": 2.0,
    "per_inference": {"joules": 1.0, "interval": INTERVAL},
}
TOKENS = {
    "per_prompt_token": {"joules": 0.1, "interval": None},
    "per_generated_token": {"joules": 0.2, "interval": {**INTERVAL, "low": 0.19, "high": 0.21}},
}


def get_text(client: TestClient, path: str, **query: Any) -> str:
    answer = client.get(f"{path}?{urlencode(query)}")
    assert answer.status_code == 200, answer.text[-800:]
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", answer.text)).split())


def write_bench(folder: Path, energy: dict[str, Any]) -> None:
    side = {"label": "A", "name": "net", "model": "net.onnx", "outcome": "PASS", "energy": energy}
    write_record(folder / "bench.json", {"sides": [side], "finished": True})


def test_bench_page_shows_energies_of_tokens_with_intervals(tmp_path: Path) -> None:
    write_bench(tmp_path / "b", {**ENERGY, **TOKENS})
    with asking(tmp_path) as client:
        text = get_text(client, "/session", id="b")
    assert "Energy Its interval Energy of a prompt token Its interval Energy of a generated token Its interval" in text
    assert "1 J 900 mJ to 1.1 J 100 mJ 200 mJ 190 mJ to 210 mJ 5 W 5.5 W 2 W" in text


def test_bench_page_shows_why_energy_is_refused(tmp_path: Path) -> None:
    refused = {"meter": "file", "refused": "idle drift", "reason": "the idle power changed"}
    write_bench(tmp_path / "b", refused)
    with asking(tmp_path) as client:
        text = get_text(client, "/session", id="b")
    assert "idle drift: the idle power changed" in text
    assert "prompt token" not in text


def test_case_page_shows_energy_with_interval(tmp_path: Path) -> None:
    write_run(tmp_path, "r", [{"name": "net", "outcome": "PASS", "energy": ENERGY}])
    with asking(tmp_path) as client:
        text = get_text(client, "/case", id="r", case="net")
        listed = get_text(client, "/session", id="r", order="-energy")
    assert "Energy energy 1 J (99%: 900 mJ to 1.1 J) an inference" in text
    assert "power average 5 W, above idle 3 W, peak 5.5 W, idle 2 W" in text
    assert "Host time Energy Max abs" in listed


def test_case_page_ignores_invalid_energy(tmp_path: Path) -> None:
    write_run(tmp_path, "r", [{"name": "net", "outcome": "PASS", "energy": {"meter": 3}}])
    with asking(tmp_path) as client:
        assert "an inference" not in get_text(client, "/case", id="r", case="net")
        assert "Host time Max abs" in get_text(client, "/session", id="r")
