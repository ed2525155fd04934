// UART of Arm's CMSDK, on the MPS2 and MPS3 boards.
#include "hil.h"

#define REGISTER(offset) (*(volatile uint32_t *)(HIL_UART + (offset)))
#define DATA REGISTER(0)
#define STATE REGISTER(4)
#define CONTROL REGISTER(8)
#define INTERRUPT REGISTER(12)
#define DIVIDER REGISTER(16)
#define RECEIVED 2

void hil_uart_init(void) {
  DIVIDER = HIL_UART_HZ / HIL_BAUD < 16 ? 16 : HIL_UART_HZ / HIL_BAUD;
  CONTROL = 3;  // transmit and receive
#ifdef HIL_UART_IRQ
  CONTROL = 11;  // and an interrupt for each received byte
#endif
}

int hil_uart_read(void) {
  if (!(STATE & RECEIVED)) return -1;
  INTERRUPT = RECEIVED;  // before the byte is taken: the next byte sets it again
  return DATA & 0xff;
}

void hil_uart_write(uint8_t byte) {
  while (STATE & 1) {
  }
  DATA = byte;
}
