// Frames: COBS(kind u8, sequence u32, body, CRC-32 of these) followed by a zero byte. Numbers are little endian.

#include "hil.h"

#define HEADER 5
#define MAX_FRAME (HEADER + HIL_DATA + 16 + 4)

#ifdef HIL_UART_IRQ
_Static_assert((HIL_RING & (HIL_RING - 1)) == 0, "HIL_RING must be a power of two");
static volatile uint8_t ring[HIL_RING];
volatile uint32_t hil_received;
static volatile uint32_t taken;

// Store the received bytes. If the ring is full, they are lost, and the checksum of their frame is wrong.
void hil_on_uart(void) {
  for (int byte; (byte = hil_uart_read()) >= 0;)
    if (hil_received - taken < HIL_RING) ring[hil_received++ % HIL_RING] = byte;
}

static int next_byte(void) {
  if (taken == hil_received) return -1;
  uint8_t byte = ring[taken % HIL_RING];
  taken++;  // after the byte is read: the interrupt then stores another byte at its place
  return byte;
}
#else
#define next_byte hil_uart_read
#endif

static uint8_t received[MAX_FRAME];
static uint32_t filled, block;  // decoded bytes; bytes until the next code byte
static bool is_zero_due, is_bad;
uint32_t hil_bad_frames;

uint32_t hil_crc32(uint32_t crc, const void *data, uint32_t length) {
  // Four bits at a time: a table of 64 bytes instead of 1 KB.
  static const uint32_t table[16] = {0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4,
                                     0x4db26158, 0x5005713c, 0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
                                     0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
  const uint8_t *bytes = data;
  crc = ~crc;
  while (length--) {
    crc ^= *bytes++;
    crc = crc >> 4 ^ table[crc & 15];
    crc = crc >> 4 ^ table[crc & 15];
  }
  return ~crc;
}

static void restart(void) {
  filled = block = 0;
  is_zero_due = is_bad = false;
}

static void append(uint8_t byte) {
  if (filled == MAX_FRAME)
    is_bad = true;
  else
    received[filled++] = byte;
}

static bool finish(struct hil_frame *frame) {
  bool is_complete = !is_bad && block == 0 && filled >= HEADER + 4;
  uint32_t length = filled, crc;
  restart();
  if (length == 0) return false;  // two zero bytes: no frame between them
  if (is_complete) memcpy(&crc, received + length - 4, 4);
  if (!is_complete || crc != hil_crc32(0, received, length - 4)) {
    hil_bad_frames++;
    return false;
  }
  frame->kind = received[0];
  memcpy(&frame->sequence, received + 1, 4);
  frame->body = received + HEADER;
  frame->length = length - HEADER - 4;
  return true;
}

// Read the available bytes. Returns true once a valid frame is complete; its body is valid until the next call.
bool hil_receive(struct hil_frame *frame) {
  for (int byte; (byte = next_byte()) >= 0;) {
    if (byte == 0) {
      if (finish(frame)) return true;
    } else if (block == 0) {
      if (is_zero_due) append(0);
      block = byte - 1;
      is_zero_due = byte != 255;
    } else {
      append(byte);
      block--;
    }
  }
  return false;
}

static uint8_t waiting[254];
static uint32_t waiting_count;

static void flush(uint8_t code) {
  hil_uart_write(code);
  for (uint32_t i = 0; i < waiting_count; i++) hil_uart_write(waiting[i]);
  waiting_count = 0;
}

static void encode(const void *data, uint32_t length) {
  const uint8_t *bytes = data;
  for (; length--; bytes++) {
    if (*bytes) waiting[waiting_count++] = *bytes;
    if (*bytes == 0)
      flush(waiting_count + 1);
    else if (waiting_count == 254)
      flush(255);
  }
}

void hil_send(uint8_t kind, uint32_t sequence, const void *body, uint32_t length) {
  uint8_t header[HEADER] = {kind};
  memcpy(header + 1, &sequence, 4);
  uint32_t crc = hil_crc32(hil_crc32(0, header, HEADER), body, length);
  waiting_count = 0;
  encode(header, HEADER);
  encode(body, length);
  encode(&crc, 4);
  flush(waiting_count + 1);
  hil_uart_write(0);
}
