"""Every reader of untrusted files has a fuzzer, or a documented reason for not having one."""

from __future__ import annotations

import pytest
from fuzzing.targets import FUZZERS, MODEL_FUZZERS, NOT_FUZZED

from hil.controller.models.importers import _BUILT_IN as IMPORTERS


def test_every_model_format_has_a_fuzzer_or_reason():
    classified = {*MODEL_FUZZERS, *NOT_FUZZED}
    assert set(IMPORTERS) == classified, "see MODEL_FUZZERS in tests/fuzzing/targets.py"
    assert not set(MODEL_FUZZERS) & set(NOT_FUZZED)


@pytest.mark.parametrize("name", sorted(set(MODEL_FUZZERS.values())))
def test_fuzzer_exists_and_confirms_crashes_in_a_process(name):
    assert name in FUZZERS
    assert name == "bundles" or FUZZERS[name].confirm is not None
