// The C functions that the compiler and IREE's code call. There is no C library for these chips in a wheel.
#include "hil.h"

void *memcpy(void *restrict target, const void *restrict source, size_t length) {
  uint8_t *to = target;
  for (const uint8_t *from = source; length--;) *to++ = *from++;
  return target;
}

void *memmove(void *target, const void *source, size_t length) {
  uint8_t *to = target;
  const uint8_t *from = source;
  if (to <= from) return memcpy(target, source, length);
  while (length--) to[length] = from[length];
  return target;
}

void *memset(void *target, int value, size_t length) {
  for (uint8_t *to = target; length--;) *to++ = value;
  return target;
}

int strcmp(const char *left, const char *right) {
  while (*left && *left == *right) left++, right++;
  return (uint8_t)*left - (uint8_t)*right;
}
