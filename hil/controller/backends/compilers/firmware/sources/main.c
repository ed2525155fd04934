// Answer the host's requests. Each response has the request's kind and sequence number.
//
// The host repeats a request that is not answered in time. WRITE and READ may run twice. RUN runs once: a repeated RUN
// gets the stored response.

#include "hil.h"

enum request { HELLO = 1, WRITE, RUN, READ, RESET, DAMAGED };
enum area { OUTPUTS, TICKS, FAULT };
enum status { OK, BAD_REQUEST, BAD_INPUTS, RUN_FAILED };

#define VERSION 1
// The host sends up to this many requests before it waits. An older request is a late repetition.
#define WINDOW 2

struct hello {
  uint16_t version, data;
  uint8_t digest[32];
  uint32_t tick_hz, bad_frames, fault_kind, window, image_crc;
};
struct write { uint32_t offset; };
struct run { uint32_t inputs_crc, timeout_ms; };
struct run_result { uint32_t status, code, outputs_crc, step; uint64_t ticks; };
struct read { uint32_t area, offset, length; };

struct hil_fault hil_fault __attribute__((section(".noinit")));
static uint32_t last, last_run;
static struct run_result result;
static uint32_t image_crc;
static bool is_loaded, is_greeted;

void hil_report_fault(uint32_t kind, uint32_t pc, uint32_t lr, uint32_t sp) {
  hil_fault.magic = HIL_FAULT_MAGIC;
  hil_fault.kind = kind;
  hil_fault.step = hil_step;
  hil_fault.pc = pc;
  hil_fault.lr = lr;
  hil_fault.sp = sp;
  hil_cpu_reset();
}

// Copy between a buffer and consecutive areas. Returns false if the range exceeds the areas.
static bool copy_areas(const struct hil_area *areas, uint32_t count, uint32_t offset, uint8_t *data, uint32_t length,
                       bool is_write) {
  for (uint32_t i = 0; i < count && length; i++) {
    if (offset >= areas[i].length) {
      offset -= areas[i].length;
      continue;
    }
    uint32_t part = areas[i].length - offset < length ? areas[i].length - offset : length;
    if (is_write)
      memcpy(areas[i].start + offset, data, part);
    else
      memcpy(data, areas[i].start + offset, part);
    data += part;
    length -= part;
    offset = 0;
  }
  return length == 0;
}

static uint32_t crc_areas(const struct hil_area *areas, uint32_t count) {
  uint32_t crc = 0;
  for (uint32_t i = 0; i < count; i++) crc = hil_crc32(crc, areas[i].start, areas[i].length);
  return crc;
}

static void say_hello(const struct hil_frame *frame) {
  struct hello answer = {VERSION, HIL_DATA, {0}, HIL_TICK_HZ, hil_bad_frames, HIL_NO_FAULT, WINDOW, image_crc};
  memcpy(answer.digest, hil_program.digest, sizeof answer.digest);
  if (hil_fault.magic == HIL_FAULT_MAGIC) answer.fault_kind = hil_fault.kind;
  hil_send(HELLO, frame->sequence, &answer, sizeof answer);
}

static void answer_write(const struct hil_frame *frame) {
  struct write request;
  uint32_t status = BAD_REQUEST;
  if (frame->length >= sizeof request) {
    memcpy(&request, frame->body, sizeof request);
    uint8_t *data = (uint8_t *)frame->body + sizeof request;
    if (copy_areas(hil_program.inputs, hil_program.input_count, request.offset, data, frame->length - sizeof request,
                   true))
      status = OK;
  }
  hil_send(WRITE, frame->sequence, &status, sizeof status);
}

static void answer_run(const struct hil_frame *frame) {
  struct run request;
  if (frame->length != sizeof request || frame->sequence != last_run) {
    memset(&result, 0, sizeof result);
    result.status = BAD_REQUEST;
  }
  if (frame->length == sizeof request && frame->sequence != last_run) {
    memcpy(&request, frame->body, sizeof request);
    last_run = frame->sequence;
    hil_fault.magic = 0;
    result.status = OK;
    if (crc_areas(hil_program.inputs, hil_program.input_count) != request.inputs_crc) result.status = BAD_INPUTS;
    if (!is_loaded) result.status = RUN_FAILED;
    if (result.status == OK) {
      uint64_t start = hil_ticks();
      hil_deadline = start + (uint64_t)request.timeout_ms * HIL_TICK_HZ / 1000;
      hil_has_deadline = request.timeout_ms;
      result.code = hil_run();
      hil_has_deadline = false;
      result.ticks = hil_ticks() - start;
      if (result.code) result.status = RUN_FAILED;
    }
    result.step = hil_step;
    result.outputs_crc = crc_areas(hil_program.outputs, hil_program.output_count);
  }
  hil_send(RUN, frame->sequence, &result, sizeof result);
}

static void answer_read(const struct hil_frame *frame) {
  static uint8_t data[4 + HIL_DATA];
  struct read request = {0};
  struct hil_area ticks = {(uint8_t *)hil_program.ticks, hil_program.step_count * 4};
  struct hil_area fault = {(uint8_t *)&hil_fault, sizeof hil_fault};
  bool is_read = false;
  if (frame->length == sizeof request) memcpy(&request, frame->body, sizeof request);
  if (request.length <= HIL_DATA && request.length) {
    const struct hil_area *areas = request.area == TICKS ? &ticks : request.area == FAULT ? &fault : hil_program.outputs;
    uint32_t count = request.area == OUTPUTS ? hil_program.output_count : 1;
    is_read = request.area <= FAULT && copy_areas(areas, count, request.offset, data + 4, request.length, false);
  }
  data[0] = is_read ? OK : BAD_REQUEST;
  hil_send(READ, frame->sequence, data, 4 + (is_read ? request.length : 0));
}

int main(void) {
  struct hil_frame frame;
  uint32_t reported = 0;
  hil_uart_init();
  hil_cpu_init();
  image_crc = hil_crc32(0, hil_image_start, hil_image_end - hil_image_start);
  is_loaded = hil_load();
  // Tell a waiting host about the start. Sequence number 0 is never used by requests.
  say_hello(&(struct hil_frame){.sequence = 0});
  for (;;) {
    bool is_received = hil_receive(&frame);
    if (hil_bad_frames != reported) {  // the host repeats its requests sooner, and knows that the board works
      reported = hil_bad_frames;
      hil_send(DAMAGED, 0, 0, 0);
    }
    if (!is_received) continue;
    if (frame.kind == HELLO) {  // a new host restarts the numbers
      last = frame.sequence;
      last_run = 0;
      is_greeted = true;
      say_hello(&frame);
      continue;
    }
    if (!is_greeted && frame.kind != RESET) {  // the host may not know about the start: its message can be lost
      say_hello(&(struct hil_frame){.sequence = 0});
      continue;
    }
    if (frame.sequence + WINDOW < last) continue;  // late repetition
    if (frame.sequence > last) last = frame.sequence;
    if (frame.kind == WRITE) answer_write(&frame);
    if (frame.kind == RUN) answer_run(&frame);
    if (frame.kind == READ) answer_read(&frame);
    if (frame.kind == RESET) hil_cpu_reset();
  }
}
