"""Explain faults of microcontrollers."""

from __future__ import annotations

from hil.core.chips import Chip
from hil.formats.firmware import Firmware
from hil.mcu.messages import FaultRecord

NO_FAULT, CPU_FAULT, WATCHDOG = 0, 1, 2
# A stack pointer in this range below RAM is a stack overflow.
_BELOW_RAM = 1 << 24
# Bits of the Configurable Fault Status Register. Source: Armv8-M Architecture Reference Manual, D1.2.
_CFSR = {
    0: "instruction access violation (MemManage)",
    1: "data access violation (MemManage)",
    3: "unstacking violation (MemManage)",
    4: "stacking violation (MemManage)",
    5: "floating-point state violation (MemManage)",
    8: "instruction bus error",
    9: "precise data bus error",
    10: "imprecise data bus error",
    11: "bus error on unstacking",
    12: "bus error on stacking",
    13: "bus error on floating-point state",
    16: "undefined instruction",
    17: "invalid execution state",
    18: "invalid return address",
    19: "no coprocessor",
    20: "stack overflow",
    24: "unaligned access",
    25: "division by zero",
}
_ADDRESS_BITS = {7: 2, 15: 3}  # bit that marks an address as valid -> index of the address register
# Exception codes of mcause. Source: The RISC-V Instruction Set Manual, Volume II, table "mcause".
_MCAUSE = {
    0: "instruction address misaligned",
    1: "instruction access fault",
    2: "illegal instruction",
    3: "breakpoint",
    4: "load address misaligned",
    5: "load access fault",
    6: "store address misaligned",
    7: "store access fault",
}
_VECTOR_BITS = {1: "bus error while reading the vector table", 30: "escalated fault"}


def explain_fault(fault: FaultRecord, firmware: Firmware, chip: Chip) -> tuple[str, str]:
    """Return a message that names the function, and the registers as detail."""
    function = firmware.find_symbol(fault.pc)
    arch = chip.core.arch
    caller = firmware.find_symbol(fault.lr & ~1)
    place = f" in {function}" if function else f" at {fault.pc:#010x}" + (f", called by {caller}" if caller else "")
    if not fault.pc:
        step = firmware.steps[fault.step].name if fault.step < len(firmware.steps) else ""
        place = f" in {step}" if step else f" in step {fault.step}"
    if fault.kind == WATCHDOG:
        what = "the run exceeded the time limit of the firmware's watchdog"
    elif 0 <= chip.ram.start - fault.sp < _BELOW_RAM:
        what = "stack overflow"  # the stack is at the start of RAM
    elif arch.startswith("riscv"):
        what = _MCAUSE.get(fault.status[0], f"exception {fault.status[0]}")
    else:
        what = _explain_arm(fault.status)
    registers = [
        f"pc {fault.pc:#010x} {function}".rstrip(),
        f"lr {fault.lr:#010x} {caller}".rstrip(),
        f"sp {fault.sp:#010x}",
    ]
    names = ("mcause", "mtval") if arch.startswith("riscv") else ("CFSR", "HFSR", "MMFAR", "BFAR")
    registers += [f"{name} {value:#010x}" for name, value in zip(names, fault.status, strict=False)]
    return f"{what}{place}", "\n".join([*registers, f"step {fault.step} of {len(firmware.steps)}"])


def _explain_arm(status: tuple[int, ...]) -> str:
    cfsr, hfsr = status[0], status[1]
    causes = [text for bit, text in _CFSR.items() if cfsr >> bit & 1]
    causes += [text for bit, text in _VECTOR_BITS.items() if hfsr >> bit & 1 and (bit != 30 or not causes)]
    addresses = [f"{status[index]:#010x}" for bit, index in _ADDRESS_BITS.items() if cfsr >> bit & 1]
    at = f" for address {addresses[0]}" if addresses else ""
    return ("; ".join(causes) or "hard fault") + at
