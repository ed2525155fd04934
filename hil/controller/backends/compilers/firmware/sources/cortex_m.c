// Start, interrupts, faults and ticks of Arm Cortex-M. The ticks are those of SysTick, at the clock of the CPU.

#include "hil.h"

#define REGISTER(address) (*(volatile uint32_t *)(address))
#define SYSTICK_CONTROL REGISTER(0xe000e010)
#define SYSTICK_RELOAD REGISTER(0xe000e014)
#define SYSTICK_VALUE REGISTER(0xe000e018)
#define INTERRUPT_ENABLE(number) REGISTER(0xe000e100 + (number) / 32 * 4)
#define INTERRUPT_CONTROL REGISTER(0xe000ed04)
#define RESET_CONTROL REGISTER(0xe000ed0c)
#define FAULT_STATUS REGISTER(0xe000ed28)
#define HARD_FAULT_STATUS REGISTER(0xe000ed2c)
#define MEMORY_ADDRESS REGISTER(0xe000ed34)
#define BUS_ADDRESS REGISTER(0xe000ed38)
#define MPU_TYPE REGISTER(0xe000ed90)
#define MPU_CONTROL REGISTER(0xe000ed94)
#define MPU_ADDRESS REGISTER(0xe000ed9c)
#define MPU_SIZE REGISTER(0xe000eda0)

#define PERIOD (HIL_TICK_HZ / 100 < 0x1000000 ? HIL_TICK_HZ / 100 : 0x1000000)  // 10 ms; SysTick has 24 bits
#define SYSTICK_PENDING (1u << 26)
#define NOT_STACKED (1u << 4 | 1u << 12 | 1u << 20)  // MSTKERR, STKERR, STKOF
#define GUARD_SIZE 0x1000000u

int main(void);
extern uint32_t hil_stack_bottom[], hil_stack_top[], hil_emergency_top[];
extern uint32_t hil_data_start[], hil_data_end[], hil_bss_start[], hil_bss_end[];
extern const uint32_t hil_data_image[];
static volatile uint64_t periods;

void hil_cpu_init(void) {
#if __ARM_ARCH < 8
  // Without a stack limit register, forbid access to the memory below the stack, which is at the start of RAM.
  if (MPU_TYPE && HIL_RAM % GUARD_SIZE == 0) {
    MPU_ADDRESS = (HIL_RAM - GUARD_SIZE) | 0x10;  // region 0
    MPU_SIZE = 1u << 28 | 23 << 1 | 1;            // never execute, no access, 2^(23 + 1) bytes
    MPU_CONTROL = 5;                              // on; the default memory map elsewhere
    __asm__ volatile("dsb\nisb");
  }
#endif
  SYSTICK_RELOAD = PERIOD - 1;
  SYSTICK_VALUE = 0;
  SYSTICK_CONTROL = 7;  // clock of the CPU, interrupt, on
#ifdef HIL_UART_IRQ
  INTERRUPT_ENABLE(HIL_UART_IRQ) = 1u << HIL_UART_IRQ % 32;
#endif
}

uint64_t hil_ticks(void) {
  for (;;) {
    uint64_t before = periods;
    uint32_t value = SYSTICK_VALUE;
    bool is_pending = INTERRUPT_CONTROL & SYSTICK_PENDING;
    if (before == periods && !is_pending) return before * PERIOD + (PERIOD - 1 - value);
  }
}

void hil_cpu_reset(void) {
  __asm__ volatile("dsb");
  RESET_CONTROL = 0x05fa0004;
  for (;;) {
  }
}

// Store the registers of a fault. `stack` points to the registers that the CPU pushed: r0 to r3, r12, lr, pc.
__attribute__((used)) static void report(const uint32_t *stack, uint32_t kind) {
  hil_fault.status[0] = FAULT_STATUS;
  hil_fault.status[1] = HARD_FAULT_STATUS;
  hil_fault.status[2] = MEMORY_ADDRESS;
  hil_fault.status[3] = BUS_ADDRESS;
  // After a stack overflow the CPU could not push the registers.
  bool is_valid = stack >= hil_stack_bottom && stack + 8 <= hil_stack_top && !(FAULT_STATUS & NOT_STACKED);
  hil_report_fault(kind, is_valid ? stack[6] : 0, is_valid ? stack[5] : 0, (uint32_t)stack);
}

__attribute__((naked)) static void on_fault(void) {
  // A stack of its own: the fault may be a stack overflow.
  __asm__ volatile(
      "mov r0, sp\n"
      "ldr r2, =hil_emergency_top\n"
#if __ARM_ARCH >= 8
      "mov r1, #0\n"
      "msr msplim, r1\n"
#endif
      "mov sp, r2\n"
      "movs r1, #1\n"
      "b report\n");
}

__attribute__((used)) static void on_period(const uint32_t *stack) {
  periods++;
  if (hil_has_deadline && periods * PERIOD > hil_deadline) report(stack, HIL_WATCHDOG);
}

__attribute__((naked)) static void on_systick(void) {
  __asm__ volatile("mov r0, sp\n" "push {r4, lr}\n" "bl on_period\n" "pop {r4, pc}\n");
}

__attribute__((used, noreturn)) static void start(void) {
  memcpy(hil_data_start, hil_data_image, (uint8_t *)hil_data_end - (uint8_t *)hil_data_start);
  memset(hil_bss_start, 0, (uint8_t *)hil_bss_end - (uint8_t *)hil_bss_start);
  main();
  hil_cpu_reset();
}

extern const uintptr_t hil_vectors[];

__attribute__((naked, noreturn)) static void on_reset(void) {
  __asm__ volatile(
      "ldr r0, =hil_stack_top\n"
      "mov sp, r0\n"
#if __ARM_ARCH >= 8
      "ldr r0, =hil_stack_bottom\n"
      "msr msplim, r0\n"
#endif
      "ldr r0, =0xe000ed08\n" "ldr r1, =hil_vectors\n" "str r1, [r0]\n"
      // Enable the floating-point unit, and the faults with their own status.
      "ldr r0, =0xe000ed88\n" "ldr r1, [r0]\n" "orr r1, r1, #0xf00000\n" "str r1, [r0]\n"
      "ldr r0, =0xe000ed24\n" "ldr r1, [r0]\n" "orr r1, r1, #0x70000\n" "str r1, [r0]\n"
      "dsb\n" "isb\n"
      "b start\n");
}

// The CPU requires an alignment of the table's size, rounded up to a power of two, and of at least 128 bytes.
#ifdef HIL_UART_IRQ
#define ALIGNMENT (HIL_UART_IRQ < 16 ? 128 : HIL_UART_IRQ < 48 ? 256 : HIL_UART_IRQ < 112 ? 512 : 1024)
#else
#define ALIGNMENT 128
#endif
__attribute__((section(".vectors"), used, aligned(ALIGNMENT))) const uintptr_t hil_vectors[] = {
    (uintptr_t)hil_stack_top, (uintptr_t)on_reset, (uintptr_t)on_fault, (uintptr_t)on_fault,
    (uintptr_t)on_fault,      (uintptr_t)on_fault, (uintptr_t)on_fault, (uintptr_t)on_fault,
    [15] = (uintptr_t)on_systick,
#ifdef HIL_UART_IRQ
    [16 + HIL_UART_IRQ] = (uintptr_t)hil_on_uart,
#endif
};
