// Shared declarations of the firmware. No part allocates memory after start.
#ifndef HIL_H
#define HIL_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// ---- libc.c
void *memcpy(void *restrict target, const void *restrict source, size_t length);
void *memmove(void *target, const void *source, size_t length);
void *memset(void *target, int value, size_t length);
int strcmp(const char *left, const char *right);

// ---- Board support: a file per UART (uart_*.c), or the file that a board config names.
// If HIL_UART_IRQ is defined, hil_uart_init enables the UART's receive interrupt with this number, and hil_uart_read
// acknowledges it. Without the interrupt, the firmware loses bytes that arrive during a run.
void hil_uart_init(void);
int hil_uart_read(void);  // the next received byte, or -1
void hil_uart_write(uint8_t byte);

// ---- Received bytes: frames.c.
// Bytes between the interrupt and the firmware: a power of two, and more than the host sends before it waits.
#ifndef HIL_RING
#define HIL_RING 4096u
#endif
void hil_on_uart(void);  // called by the interrupt
extern volatile uint32_t hil_received;  // bytes since start

// ---- CPU support: cortex_m.c or riscv.c.
void hil_cpu_init(void);
uint64_t hil_ticks(void);  // ticks of HIL_TICK_HZ since start
void hil_cpu_reset(void) __attribute__((noreturn));

enum hil_fault_kind { HIL_NO_FAULT, HIL_CPU_FAULT, HIL_WATCHDOG };

// Record of the last fault. It survives a reset.
struct hil_fault {
  uint32_t magic, kind, step;
  uint32_t pc, lr, sp;
  uint32_t status[4];  // Cortex-M: CFSR, HFSR, MMFAR, BFAR; RISC-V: mcause, mtval
};
extern struct hil_fault hil_fault;
#define HIL_FAULT_MAGIC 0x48494c46u
// Store a fault and reset.
void hil_report_fault(uint32_t kind, uint32_t pc, uint32_t lr, uint32_t sp) __attribute__((noreturn));
// Stop a run at this time in ticks, while hil_has_deadline is set. The interrupt may read one half of the new time
// and one half of the old, so the flag is only set while the time does not change.
extern volatile uint64_t hil_deadline;
extern volatile bool hil_has_deadline;

// ---- Linker script: the image in flash.
extern const uint8_t hil_image_start[], hil_image_end[];

// ---- Program: model.c, generated for each model.
enum hil_step_kind { HIL_FILL, HIL_COPY, HIL_DISPATCH };

struct hil_step {
  uint8_t kind, binding_count, constant_count, pattern_length;
  uint16_t function;
  uint16_t size_z;
  uint32_t size_x, size_y;        // workgroup counts
  void *const *bindings;          // HIL_FILL: target; HIL_COPY: target, source
  const size_t *lengths;          // in bytes, one for each binding
  const uint32_t *constants;      // HIL_FILL: the pattern
};

struct hil_area {
  uint8_t *start;
  uint32_t length;
};

typedef int (*hil_function)(const void *environment, const void *dispatch, const void *workgroup);

struct hil_program {
  uint8_t digest[32];
  const void *(*query)(uint32_t version, const void *environment);
  const char *const *names;  // of the dispatch functions
  hil_function *functions;   // addresses, set at start
  const struct hil_step *initial, *steps;  // at start and before each run; in each run
  const struct hil_area *inputs, *outputs;
  uint32_t *ticks;  // one for each step
  uint16_t function_count, initial_count, step_count, input_count, output_count;
};
extern const struct hil_program hil_program;

// Run the program once. Returns 0, or the value that a dispatch function returned.
uint32_t hil_run(void);
bool hil_load(void);
extern volatile uint32_t hil_step;  // current step

// ---- Frames: COBS, sequence number, CRC-32.
#define HIL_DATA 1024
struct hil_frame {
  uint8_t kind;
  uint32_t sequence;
  const uint8_t *body;
  uint32_t length;
};
bool hil_receive(struct hil_frame *frame);
void hil_send(uint8_t kind, uint32_t sequence, const void *body, uint32_t length);
uint32_t hil_crc32(uint32_t crc, const void *data, uint32_t length);
extern uint32_t hil_bad_frames;
#endif
