// UART 16550, on many RISC-V boards.
#include "hil.h"

#define REGISTER(index) (*(volatile uint8_t *)(HIL_UART + (index)))

void hil_uart_init(void) {
  uint32_t divider = HIL_UART_HZ / (16 * HIL_BAUD);
  if (!divider) divider = 1;
  REGISTER(1) = 0;     // no interrupts
  REGISTER(3) = 0x80;  // the first two registers are the divider
  REGISTER(0) = divider & 0xff;
  REGISTER(1) = divider >> 8;
  REGISTER(3) = 3;  // 8 bits, no parity, 1 stop bit
  REGISTER(2) = 1;  // FIFO
#ifdef HIL_UART_IRQ
  REGISTER(1) = 1;  // interrupt for each received byte
#endif
}

int hil_uart_read(void) { return REGISTER(5) & 1 ? REGISTER(0) : -1; }

void hil_uart_write(uint8_t byte) {
  while (!(REGISTER(5) & 0x20)) {
  }
  REGISTER(0) = byte;
}
