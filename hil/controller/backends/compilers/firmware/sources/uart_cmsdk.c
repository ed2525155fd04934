// UART of Arm's CMSDK, on the MPS2 and MPS3 boards.
#include "hil.h"

#define REGISTER(offset) (*(volatile uint32_t *)(HIL_UART + (offset)))
#define DATA REGISTER(0)
#define STATE REGISTER(4)
#define CONTROL REGISTER(8)
#define DIVIDER REGISTER(16)

void hil_uart_init(void) {
  DIVIDER = HIL_UART_HZ / HIL_BAUD < 16 ? 16 : HIL_UART_HZ / HIL_BAUD;
  CONTROL = 3;  // transmit and receive
}

int hil_uart_read(void) { return STATE & 2 ? (int)(DATA & 0xff) : -1; }

void hil_uart_write(uint8_t byte) {
  while (STATE & 1) {
  }
  DATA = byte;
}
