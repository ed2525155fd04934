#include "blake3.h"

#include <string.h>

enum { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8, BLOCK = 64, CHUNK = 1024 };

static const uint32_t IV[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                               0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
static const uint8_t ORDER[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};

static uint32_t rotated(uint32_t value, int by)
{
    return value >> by | value << (32 - by);
}

static void mix(uint32_t *v, int a, int b, int c, int d, uint32_t x, uint32_t y)
{
    v[a] += v[b] + x;
    v[d] = rotated(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotated(v[b] ^ v[c], 12);
    v[a] += v[b] + y;
    v[d] = rotated(v[d] ^ v[a], 8);
    v[c] += v[d];
    v[b] = rotated(v[b] ^ v[c], 7);
}

static void compress(uint32_t chain[8], const uint8_t block[BLOCK], uint32_t length, uint64_t counter, uint32_t flags)
{
    uint32_t m[16], next[16];
    uint32_t v[16] = {chain[0], chain[1], chain[2], chain[3], chain[4], chain[5], chain[6], chain[7],
                      IV[0], IV[1], IV[2], IV[3], (uint32_t)counter, (uint32_t)(counter >> 32), length, flags};
    memcpy(m, block, BLOCK);
    for (int round = 0; round < 7; round++) {
        mix(v, 0, 4, 8, 12, m[0], m[1]);
        mix(v, 1, 5, 9, 13, m[2], m[3]);
        mix(v, 2, 6, 10, 14, m[4], m[5]);
        mix(v, 3, 7, 11, 15, m[6], m[7]);
        mix(v, 0, 5, 10, 15, m[8], m[9]);
        mix(v, 1, 6, 11, 12, m[10], m[11]);
        mix(v, 2, 7, 8, 13, m[12], m[13]);
        mix(v, 3, 4, 9, 14, m[14], m[15]);
        for (int i = 0; i < 16; i++)
            next[i] = m[ORDER[i]];
        memcpy(m, next, sizeof m);
    }
    for (int i = 0; i < 8; i++)
        chain[i] = v[i] ^ v[i + 8];
}

static void chunk_chain(uint32_t chain[8], const uint8_t *data, uint64_t size, uint64_t number, uint32_t last)
{
    memcpy(chain, IV, sizeof IV);
    uint32_t start = CHUNK_START;
    do {
        uint32_t length = size > BLOCK ? BLOCK : (uint32_t)size;
        uint8_t block[BLOCK] = {0};
        if (length)
            memcpy(block, data, length);
        compress(chain, block, length, number, start | (size > BLOCK ? 0 : CHUNK_END | last));
        start = 0;
        data += length;
        size -= length;
    } while (size);
}

static void join(uint32_t left[8], const uint32_t right[8], uint32_t last)
{
    uint8_t block[BLOCK];
    memcpy(block, left, 32);
    memcpy(block + 32, right, 32);
    memcpy(left, IV, sizeof IV);
    compress(left, block, BLOCK, 0, PARENT | last);
}

void blake3(const uint8_t *data, uint64_t size, uint8_t digest[32])
{
    uint32_t stack[54][8]; /* chaining values of complete subtrees, one per bit of the number of chunks */
    uint32_t chain[8];
    int depth = 0;
    uint64_t number = 0;
    for (; size > CHUNK; number++, data += CHUNK, size -= CHUNK) {
        chunk_chain(chain, data, CHUNK, number, 0);
        for (uint64_t done = number + 1; !(done & 1); done >>= 1) {
            join(stack[depth - 1], chain, 0);
            memcpy(chain, stack[--depth], sizeof chain);
        }
        memcpy(stack[depth++], chain, sizeof chain);
    }
    chunk_chain(chain, data, size, number, depth ? 0 : ROOT);
    while (depth) {
        depth--;
        join(stack[depth], chain, depth ? 0 : ROOT);
        memcpy(chain, stack[depth], sizeof chain);
    }
    memcpy(digest, chain, 32);
}
