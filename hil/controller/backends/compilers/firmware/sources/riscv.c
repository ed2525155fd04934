// Start, interrupts, faults and ticks of RISC-V in machine mode. The ticks are those of the core-local interruptor (CLINT).

#include "hil.h"

#define TIME_LOW (*(volatile uint32_t *)(HIL_CLINT + 0xbff8))
#define TIME_HIGH (*(volatile uint32_t *)(HIL_CLINT + 0xbffc))
#define COMPARE_LOW (*(volatile uint32_t *)(HIL_CLINT + 0x4000))
#define COMPARE_HIGH (*(volatile uint32_t *)(HIL_CLINT + 0x4004))
#define PERIOD (HIL_TICK_HZ / 100)
#define TIMER_INTERRUPT 0x80000007u
#define EXTERNAL_INTERRUPT 0x8000000bu
// Platform-level interrupt controller (PLIC), for the machine mode of the first core.
#define PLIC(offset) (*(volatile uint32_t *)(HIL_PLIC + (offset)))
#define PLIC_PRIORITY PLIC(4 * HIL_UART_IRQ)
#define PLIC_ENABLE PLIC(0x2000 + HIL_UART_IRQ / 32 * 4)
#define PLIC_THRESHOLD PLIC(0x200000)
#define PLIC_CLAIM PLIC(0x200004)

int main(void);
extern uint32_t hil_data_start[], hil_data_end[], hil_bss_start[], hil_bss_end[];
extern const uint32_t hil_data_image[];
void hil_trap(void);

uint64_t hil_ticks(void) {
  for (;;) {
    uint32_t high = TIME_HIGH, low = TIME_LOW;
    if (high == TIME_HIGH) return (uint64_t)high << 32 | low;
  }
}

static void set_timer(void) {
  uint64_t next = hil_ticks() + PERIOD;
  COMPARE_HIGH = UINT32_MAX;  // no interrupt between the two writes
  COMPARE_LOW = next;
  COMPARE_HIGH = next >> 32;
}

void hil_cpu_init(void) {
  uint32_t enabled = 1 << 7;
  set_timer();
#ifdef HIL_UART_IRQ
  PLIC_PRIORITY = 1;
  PLIC_THRESHOLD = 0;
  PLIC_ENABLE = 1u << HIL_UART_IRQ % 32;
  enabled |= 1 << 11;
#endif
  __asm__ volatile("csrs mie, %0\ncsrs mstatus, %1" ::"r"(enabled), "r"(1 << 3));
}

void hil_cpu_reset(void) {
  *(volatile uint32_t *)HIL_RESET = HIL_RESET_VALUE;
  for (;;) {
  }
}

__attribute__((used)) static void on_trap(uint32_t cause, uint32_t pc, uint32_t lr, uint32_t sp) {
#ifdef HIL_UART_IRQ
  if (cause == EXTERNAL_INTERRUPT) {
    uint32_t number = PLIC_CLAIM;
    hil_on_uart();
    PLIC_CLAIM = number;
    return;
  }
#endif
  bool is_timer = cause == TIMER_INTERRUPT;
  if (is_timer) set_timer();
  if (is_timer && !(hil_has_deadline && hil_ticks() > hil_deadline)) return;
  uint32_t value;
  __asm__ volatile("csrr %0, mtval" : "=r"(value));
  hil_fault.status[0] = cause;
  hil_fault.status[1] = value;
  hil_report_fault(is_timer ? HIL_WATCHDOG : HIL_CPU_FAULT, pc, lr, sp);
}

// The trap uses a stack of its own, because the trap may be a stack overflow. It saves the registers that C may change.
__asm__(
    ".section .text.hil_trap\n.global hil_trap\n.align 2\nhil_trap:\n"
    "csrw mscratch, sp\n"
    "la sp, hil_emergency_top\n"
    "addi sp, sp, -160\n"
    "sw ra, 0(sp)\nsw t0, 4(sp)\nsw t1, 8(sp)\nsw t2, 12(sp)\nsw t3, 16(sp)\nsw t4, 20(sp)\nsw t5, 24(sp)\n"
    "sw t6, 28(sp)\nsw a0, 32(sp)\nsw a1, 36(sp)\nsw a2, 40(sp)\nsw a3, 44(sp)\nsw a4, 48(sp)\nsw a5, 52(sp)\n"
    "sw a6, 56(sp)\nsw a7, 60(sp)\n"
#ifdef __riscv_flen
    "fsw ft0, 64(sp)\nfsw ft1, 68(sp)\nfsw ft2, 72(sp)\nfsw ft3, 76(sp)\nfsw ft4, 80(sp)\nfsw ft5, 84(sp)\n"
    "fsw ft6, 88(sp)\nfsw ft7, 92(sp)\nfsw ft8, 96(sp)\nfsw ft9, 100(sp)\nfsw ft10, 104(sp)\nfsw ft11, 108(sp)\n"
    "fsw fa0, 112(sp)\nfsw fa1, 116(sp)\nfsw fa2, 120(sp)\nfsw fa3, 124(sp)\nfsw fa4, 128(sp)\nfsw fa5, 132(sp)\n"
    "fsw fa6, 136(sp)\nfsw fa7, 140(sp)\n"
#endif
    "csrr a0, mcause\ncsrr a1, mepc\nmv a2, ra\ncsrr a3, mscratch\n"
    "call on_trap\n"
    "lw ra, 0(sp)\nlw t0, 4(sp)\nlw t1, 8(sp)\nlw t2, 12(sp)\nlw t3, 16(sp)\nlw t4, 20(sp)\nlw t5, 24(sp)\n"
    "lw t6, 28(sp)\nlw a0, 32(sp)\nlw a1, 36(sp)\nlw a2, 40(sp)\nlw a3, 44(sp)\nlw a4, 48(sp)\nlw a5, 52(sp)\n"
    "lw a6, 56(sp)\nlw a7, 60(sp)\n"
#ifdef __riscv_flen
    "flw ft0, 64(sp)\nflw ft1, 68(sp)\nflw ft2, 72(sp)\nflw ft3, 76(sp)\nflw ft4, 80(sp)\nflw ft5, 84(sp)\n"
    "flw ft6, 88(sp)\nflw ft7, 92(sp)\nflw ft8, 96(sp)\nflw ft9, 100(sp)\nflw ft10, 104(sp)\nflw ft11, 108(sp)\n"
    "flw fa0, 112(sp)\nflw fa1, 116(sp)\nflw fa2, 120(sp)\nflw fa3, 124(sp)\nflw fa4, 128(sp)\nflw fa5, 132(sp)\n"
    "flw fa6, 136(sp)\nflw fa7, 140(sp)\n"
#endif
    "csrr sp, mscratch\n"
    "mret\n");

__attribute__((used, noreturn)) static void start(void) {
  memcpy(hil_data_start, hil_data_image, (uint8_t *)hil_data_end - (uint8_t *)hil_data_start);
  memset(hil_bss_start, 0, (uint8_t *)hil_bss_end - (uint8_t *)hil_bss_start);
  main();
  hil_cpu_reset();
}

__asm__(
    ".section .vectors, \"ax\"\n.global hil_vectors\nhil_vectors:\n"
    ".option push\n.option norelax\nla gp, __global_pointer$\n.option pop\n"
    "la sp, hil_stack_top\n"
    "la t0, hil_trap\ncsrw mtvec, t0\n"
    // Lock the memory from the image up to the stack against writes, so that a stack overflow faults.
    "la t0, hil_image_start\nsrli t0, t0, 2\ncsrw pmpaddr0, t0\n"
    "la t0, hil_stack_bottom\nsrli t0, t0, 2\ncsrw pmpaddr1, t0\n"
    "li t0, 0x8d00\ncsrw pmpcfg0, t0\n"
#ifdef __riscv_flen
    "li t0, 0x2000\ncsrs mstatus, t0\ncsrw fcsr, zero\n"
#endif
    "j start\n");
