"""Explanations of faults: the cause, the function, and the registers."""

from __future__ import annotations

import pytest

from hil.core.chips import CHIPS
from hil.formats.firmware import Firmware, FirmwareStep, Symbol
from hil.mcu.faults import CPU_FAULT, WATCHDOG, explain_fault
from hil.mcu.messages import FaultRecord

FIRMWARE = Firmware(
    "chip",
    "00",
    0,
    1,
    0,
    0,
    (),
    (),
    (FirmwareStep("conv_dispatch_0", "dispatch"), FirmwareStep("conv_dispatch_1", "dispatch")),
    (Symbol(0x1000, 0x100, "hil_run"), Symbol(0x2000, 0x100, "conv_dispatch_1")),
)
M4, RISCV = CHIPS["mps2-an386"], CHIPS["riscv32-virt"]
IN_RAM = 0x20001000


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            FaultRecord(CPU_FAULT, 1, 0x2010, 0x1011, IN_RAM, (1 << 16, 0, 0, 0)),
            "undefined instruction in conv_dispatch_1",
        ),
        (
            FaultRecord(CPU_FAULT, 1, 0x2010, 0x1011, IN_RAM, (1 << 9 | 1 << 15, 1 << 30, 0, 0xF0000000)),
            "precise data bus error for address 0xf0000000 in conv_dispatch_1",
        ),
        (
            FaultRecord(CPU_FAULT, 1, 0xE0000000, 0x2021, IN_RAM, (1, 0, 0, 0)),
            "instruction access violation (MemManage) at 0xe0000000, called by conv_dispatch_1",
        ),
        (FaultRecord(CPU_FAULT, 1, 0, 0, 0x1FFFFFC0, (1 << 12, 0, 0, 0)), "stack overflow in conv_dispatch_1"),
        (FaultRecord(CPU_FAULT, 9, 0, 0, IN_RAM, (0, 1 << 30, 0, 0)), "escalated fault in step 9"),
        (FaultRecord(CPU_FAULT, 0, 0x1004, 0, IN_RAM, (0, 0, 0, 0)), "hard fault in hil_run"),
        (
            FaultRecord(WATCHDOG, 0, 0x2004, 0, IN_RAM, (0, 0, 0, 0)),
            "the run exceeded the time limit of the firmware's watchdog in conv_dispatch_1",
        ),
    ],
)
def test_arm_fault_names_cause_and_function(fault: FaultRecord, message: str) -> None:
    assert explain_fault(fault, FIRMWARE, M4)[0] == message


@pytest.mark.parametrize(
    ("cause", "message"),
    [(2, "illegal instruction in conv_dispatch_1"), (7, "store access fault in conv_dispatch_1"), (19, "exception 19")],
)
def test_riscv_fault_names_cause_and_function(cause: int, message: str) -> None:
    fault = FaultRecord(CPU_FAULT, 1, 0x2010, 0x1010, 0x80401000, (cause, 0xF0000000, 0, 0))
    text, detail = explain_fault(fault, FIRMWARE, RISCV)
    assert text.startswith(message)
    assert detail.splitlines() == [
        "pc 0x00002010 conv_dispatch_1",
        "lr 0x00001010 hil_run",
        "sp 0x80401000",
        f"mcause {cause:#010x}",
        "mtval 0xf0000000",
        "step 1 of 2",
    ]
