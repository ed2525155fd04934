from __future__ import annotations

import pytest

from hil.core.stack_config import StackValue
from hil.errors import UsageError
from hil.sim import faults
from hil.sim.faults import Charges, is_affecting, parse


def test_parse_fault_fills_in_defaults():
    assert parse("crash").keys == {"signal": "SIGSEGV", "at": "run", "position": -1, "needs": "", "times": 0}


def test_parse_fault_converts_values_to_default_types():
    assert parse("slow:rate=2e6,delay=0.5").keys == {"rate": 2e6, "delay": 0.5}


def test_parse_fault_accepts_output_number_or_name():
    assert parse("corrupt:output=2").keys["output"] == 2
    assert parse("corrupt:output=conv2.out").keys["output"] == "conv2.out"


def test_fault_text_round_trips():
    for text in (
        "crash:signal=SIGILL,at=load",
        "hang",
        "corrupt:elements=5",
        "corrupt:output=/conv/Conv_output_0,others=spare",
        "corrupt:iteration=7,when=reload",
        "corrupt:share=0.01,seed=3,when=profile",
        "drop:at=0.25,times=3",
        "slow",
        "kill-agent",
        "clock:offset=-3600,ppm=200,jump=0.5",
        "profile:how=truncate,times=2",
        "slowdown:factor=1.5",
        "pace:seconds=0.25",
        "wedge:after=3,how=hang,reset=/tmp/reset",
        "throttle:after=2,lasts=3,factor=4",
        "noise:share=0.05,seed=1",
        "load:cores=2",
        "crash:position=12",
        "kv_slot:position=3",
        "mask:how=show-next",
        "rope",
        "stale_cache",
        "overflow:position=4,layer=1",
        "wrong_layer",
        "argmax:position=0",
        "slow_token:seconds=2",
    ):
        assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "explode",
        "crash:colour=red",
        "crash:signal=SIGNOTHING",
        "crash:at=lunch",
        "crash:times=-1",
        "crash:times=many",
        "crash:times",
        "drop:at=1.5",
        "slow:rate=0",
        "corrupt:output=-1",
        "corrupt:output=",
        "corrupt:others=perhaps",
        "corrupt:iteration=-2",
        "corrupt:share=0",
        "corrupt:when=never",
        "clock:ppm=1001",
        "clock:offset=inf",
        "clock:jump=nan",
        "profile:how=badly",
        "slowdown:factor=0.9",
        "slowdown:factor=inf",
        "pace:seconds=0",
        "pace:seconds=nan",
        "wedge:after=-1",
        "wedge:how=truncate",
        "wedge:reset=relative",
        "throttle:lasts=-1",
        "noise:share=2",
        "load:cores=0",
        "crash:position=-2",
        "rope:position=-1",
        "mask:how=hide-all",
        "overflow:layer=-1",
        "slow_token:seconds=0",
        "stale_cache:position=1",
    ],
)
def test_parse_fault_rejects_invalid_text(text):
    with pytest.raises(UsageError):
        parse(text)


def test_charges_limit_how_often_a_fault_fires(tmp_path):
    twice, always = parse("hang:times=2"), parse("crash")
    charges = Charges(tmp_path / "charges")
    charges.arm([twice, always])
    assert [charges.should_fire(twice) for _ in range(4)] == [True, True, False, False]
    assert all(charges.should_fire(always) for _ in range(10))


def test_needs_limits_a_fault_to_programs_with_a_text(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"\x0a conv2 \x00")
    affected = [is_affecting(parse(f"crash:needs={text}"), tmp_path / "model.onnx") for text in ("conv2", "conv3", "")]
    assert affected == [True, False, True]


def test_wedge_begins_at_run_and_ends_with_reset(tmp_path):
    fault, charges = parse(f"wedge:after=2,reset={tmp_path / 'reset'}"), Charges(tmp_path / "charges")
    charges.arm([fault])
    assert [charges.is_wedged(fault) for _ in range(4)] == [False, False, True, True]
    (tmp_path / "reset").touch()
    assert not charges.is_wedged(fault)


def test_faults_docstring_lists_every_fault():
    rows = (faults.__doc__ or "").split("\n\n")[2].splitlines()
    lines = [row.split("``")[1] for row in rows if row.startswith("``")]
    assert lines == list(faults.FAULTS)


def test_fault_needs_part_of_stack():
    fault = faults.parse("corrupt:stack=driver@2.0")
    stacks = [{}, {"driver": StackValue(text="1.0")}, {"driver": StackValue(text="2.0")}]
    assert [faults.has_required_stack(fault, one) for one in stacks] == [False, False, True]
    assert faults.has_required_stack(faults.parse("corrupt"), {})
    with pytest.raises(UsageError, match="PART@VERSION"):
        faults.parse("crash:stack=driver")
