/* BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs), plain hashing only. */
#ifndef HIL_BLAKE3_H
#define HIL_BLAKE3_H

#include <stdint.h>

void blake3(const uint8_t *data, uint64_t size, uint8_t digest[32]);

#endif
