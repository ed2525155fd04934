// Firmware as a program of this machine: the serial line is stdin and stdout, a reset starts the program again.
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "hil.h"

const uint8_t hil_image_start[4] = {1, 2, 3, 4};
__asm__(".global hil_image_end\n.set hil_image_end, hil_image_start + 4");

// The UART holds one byte. A byte that the firmware does not take within 0.5 s is lost, as on a chip without a buffer.
static atomic_int held = -1;
static pthread_t firmware;

static void on_signal(int number) {
  (void)number;
#ifdef HIL_UART_IRQ
  hil_on_uart();
#endif
}

static void *receive(void *unused) {
  (void)unused;
  for (uint8_t byte;;) {
    if (read(0, &byte, 1) != 1) exit(0);
    for (int i = 0; i < 5000 && held >= 0; i++) usleep(100);
    held = byte;
    pthread_kill(firmware, SIGUSR1);
  }
}

void hil_uart_init(void) {
  static pthread_t receiver;
  sigset_t signals;
  firmware = pthread_self();
  signal(SIGUSR1, on_signal);
  sigemptyset(&signals);
  sigaddset(&signals, SIGUSR1);
  pthread_sigmask(SIG_UNBLOCK, &signals, 0);  // a reset keeps the mask of the thread
  pthread_create(&receiver, 0, receive, 0);
}

int hil_uart_read(void) { return atomic_exchange(&held, -1); }

void hil_uart_write(uint8_t byte) {
  if (write(1, &byte, 1) != 1) exit(1);
}

void hil_cpu_init(void) {}

uint64_t hil_ticks(void) {
  struct timespec now;
  if (getenv("SLOW")) usleep(5000);  // a run has many steps, which read the ticks
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}

void hil_cpu_reset(void) {
  execl("/proc/self/exe", "board", (char *)0);
  exit(1);
}
