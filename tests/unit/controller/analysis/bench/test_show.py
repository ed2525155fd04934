"""Texts of a bench."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hil.controller.analysis.bench import show


@pytest.mark.parametrize(("found", "text"), [(None, "unknown"), (31_424, "31.4 kB"), (42_000_000, "42.0 MB")])
def test_peak_memory_of_a_microcontroller_is_not_zero(monkeypatch, found, text):
    monkeypatch.setattr(show, "_is_measured", lambda side: True)
    assert show._format_memory(SimpleNamespace(peak_memory_bytes=found)) == text
