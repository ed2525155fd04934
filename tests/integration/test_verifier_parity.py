"""The C verifier and the Python reader judge hostile bundles alike."""

from __future__ import annotations

import re
import time
from random import Random

import pytest
from fuzzing.verdicts import FUZZER
from support.hostile_bundles import READ, REFUSED, made, with_symbols
from support.verifier_verdicts import Verdicts, verdicts

from hil.bundles import names
from hil.controller.workloads.bundles import verifier

pytest.importorskip("ziglang")
pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    with verdicts(tmp_path_factory.mktemp("verdicts")) as found:
        yield found


@pytest.mark.parametrize("name", REFUSED)
def test_both_readers_refuse_a_hostile_bundle(asked: Verdicts, name: str) -> None:
    data = made()[name]
    assert asked.of_reader(data) and asked.of_verifier(data)


@pytest.mark.parametrize("name", READ)
def test_both_readers_read_an_unusual_bundle(asked: Verdicts, name: str) -> None:
    data = made()[name]
    assert (asked.of_reader(data), asked.of_verifier(data)) == ("", "")


@pytest.mark.slow
def test_both_readers_agree_on_mutated_bundles(asked: Verdicts) -> None:
    seed = int(time.time())
    rng, seeds = Random(seed), FUZZER.seeds()
    for number in range(2000):
        data = FUZZER.mutate(rng.choice(seeds), rng)
        _, difference = asked.compare(data)
        assert not difference, f"seed {seed}, input {number}: {difference}"


def test_both_readers_read_many_symbols_quickly(asked: Verdicts) -> None:
    data = with_symbols(3000)
    began = time.process_time()
    assert asked.of_reader(data) == ""
    assert time.process_time() - began < 20
    assert asked.of_verifier(data) == ""  # pytest's timeout limits this call


def test_both_readers_use_same_hidden_characters() -> None:
    source = (verifier.SOURCES / "names.c").read_text()
    table = source.partition("HIDDEN[][2] = {")[2].partition("};")[0]
    found = [tuple(int(one, 16) for one in pair) for pair in re.findall(r"\{(0x\w+), (0x\w+)\}", table)]
    assert found == list(names.HIDDEN)
