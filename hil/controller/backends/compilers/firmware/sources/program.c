// Run the schedule of the program: fills, copies and the functions of IREE's static library.
//
// The structures are those of IREE's executable library version 6. The compiler checks the version of the object file.

#include "hil.h"

#define LIBRARY_VERSION 6

struct environment {
  const uint32_t *constants;
  void *import_thunk;
  const void *imports;
  uint64_t processor[8];
};

struct dispatch_state {
  uint32_t workgroup_size_x, workgroup_size_y;
  uint16_t workgroup_size_z, constant_count;
  uint32_t workgroup_count_x, workgroup_count_y;
  uint16_t workgroup_count_z;
  uint8_t max_concurrency, binding_count;
  const uint32_t *constants;
  void *const *bindings;
  const size_t *lengths;
};

struct workgroup_state {
  uint32_t id_x, id_y;
  uint16_t id_z, reserved;
  uint32_t processor;
  void *local_memory;
  uint32_t local_memory_size;
};

struct library {
  const uint32_t *header;  // version
  uint32_t import_count;
  const void *imports;
  uint32_t function_count;
  const hil_function *functions;
  const void *attributes, *parameters, *occupancy;
  const char *const *names;
};

static const struct environment environment;
volatile uint32_t hil_step;
volatile uint64_t hil_deadline;
volatile bool hil_has_deadline;

static uint32_t dispatch(const struct hil_step *step) {
  struct dispatch_state state = {1, 1, 1, step->constant_count, step->size_x, step->size_y, step->size_z,
                                 1, step->binding_count, step->constants, step->bindings, step->lengths};
  struct workgroup_state group = {0};  // no local memory: hil refuses dispatches that need some
  hil_function function = hil_program.functions[step->function];
  for (group.id_z = 0; group.id_z < step->size_z; group.id_z++)
    for (group.id_y = 0; group.id_y < step->size_y; group.id_y++)
      for (group.id_x = 0; group.id_x < step->size_x; group.id_x++) {
        int code = function(&environment, &state, &group);
        if (code) return code;
      }
  return 0;
}

static uint32_t run_step(const struct hil_step *step) {
  if (step->kind == HIL_DISPATCH) return dispatch(step);
  if (step->kind == HIL_COPY) {
    memmove(step->bindings[0], step->bindings[1], step->lengths[0]);
  } else {
    uint8_t *target = step->bindings[0];
    const uint8_t *pattern = (const uint8_t *)step->constants;
    for (size_t i = 0; i < step->lengths[0]; i++) target[i] = pattern[i % step->pattern_length];
  }
  return 0;
}

// Find the functions by name. Returns false if the object file has another version or lacks a function.
bool hil_load(void) {
  if (!hil_program.query) return hil_program.function_count == 0;
  const struct library *library = hil_program.query(LIBRARY_VERSION, &environment);
  if (!library || *library->header != LIBRARY_VERSION) return false;
  for (uint32_t i = 0; i < hil_program.function_count; i++) {
    for (uint32_t j = 0; j < library->function_count; j++)
      if (!strcmp(library->names[j], hil_program.names[i])) hil_program.functions[i] = library->functions[j];
    if (!hil_program.functions[i]) return false;
  }
  return true;
}

uint32_t hil_run(void) {
  uint32_t code = 0;
  hil_step = 0;
  for (uint32_t i = 0; i < hil_program.initial_count && !code; i++) code = run_step(hil_program.initial + i);
  for (uint32_t i = 0; i < hil_program.step_count && !code; i++) {
    hil_step = i;
    uint64_t start = hil_ticks();
    code = run_step(hil_program.steps + i);
    uint64_t ticks = hil_ticks() - start;
    hil_program.ticks[i] = ticks > UINT32_MAX ? UINT32_MAX : ticks;
  }
  return code;
}
