"""All fuzzers, by name."""

from __future__ import annotations

from fuzzing import files, texts
from fuzzing.engine import Fuzzer

FUZZERS: dict[str, Fuzzer] = {one.name: one for one in (*files.FUZZERS, *texts.FUZZERS)}
