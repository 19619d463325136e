/* Digests of the elements of a tensor, and of 8-byte words that lie in several places: digest.py on a CPU. */

#include <stdint.h>

#define PHI 0x9E3779B97F4A7C15u
#define STRIDE 64 /* words */
#define AHEAD 512 /* words that the memory is asked for early: 1.2 instead of 1.7 ms for 31 MB on one thread */

typedef uint64_t word __attribute__((aligned(1))); /* a slice of a tensor may start at any byte */

static inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

#define SUM(type)                                                                                                      \
    for (int64_t i = 0; i < count; i++)                                                                                \
        sum += mix64((uint64_t)(int64_t)((const type *)elements)[i] ^ mix64((uint64_t)i * PHI))

/* H of `count` elements of `size` bytes, as `digest` in digest.py; 0 for another size. */
int64_t segpipe_digest(const void *elements, int64_t size, int64_t count) {
    uint64_t sum = 0;
    if (size == 1) SUM(uint8_t);
    if (size == 2) SUM(int16_t);
    if (size == 4) SUM(int32_t);
    if (size == 8) SUM(int64_t);
    return (int64_t)sum;
}

static inline uint64_t part_sum(const word *words, const uint64_t *indices, int64_t count) {
    uint64_t sum = 0;
    int64_t i = 0;
    for (; i + STRIDE <= count; i += STRIDE) {
        for (int k = 0; k < STRIDE; k += 8) __builtin_prefetch(words + i + AHEAD + k, 0, 0); /* never faults */
        for (int k = 0; k < STRIDE; k++) sum += mix64(words[i + k] ^ indices[i + k]);
    }
    for (; i < count; i++) sum += mix64(words[i] ^ indices[i]);
    return sum;
}

/* Share of the words `first` to `last - 1` in the digest of consecutive `parts`; the shares of all ranges add up to
   the digest. `first` is a multiple of `block`, and indices[i] = mix64(i * PHI) for i < block. */
static uint64_t range_digest(const word *const *parts, const int64_t *lengths, int64_t num_parts, int64_t first,
                             int64_t last, const uint64_t *indices, int64_t block) {
    int64_t place = 0, filled = 0;
    uint64_t number = first / block, total = 0, digest = 0;
    for (int64_t part = 0; part < num_parts && place < last; place += lengths[part], part++) {
        int64_t begin = first > place ? first - place : 0;
        int64_t end = lengths[part] < last - place ? lengths[part] : last - place;
        while (begin < end) {
            int64_t count = end - begin < block - filled ? end - begin : block - filled;
            total += part_sum(parts[part] + begin, indices + filled, count);
            begin += count;
            filled += count;
            if (filled == block) {
                digest += mix64(total ^ mix64(number++ * PHI));
                total = 0;
                filled = 0;
            }
        }
    }
    return filled ? digest + mix64(total ^ mix64(number * PHI)) : digest;
}

/* shares[t][g] = range_digest of the words of group g that thread t of `threads` takes, `width` each; group g ends
   before part ends[g]. */
void segpipe_digests(const word *const *parts, const int64_t *lengths, const int64_t *ends, int64_t num_groups,
                     int64_t width, int64_t threads, const uint64_t *indices, int64_t block, uint64_t *shares) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; thread++)
        for (int64_t group = 0; group < num_groups; group++) {
            int64_t start = group ? ends[group - 1] : 0;
            shares[thread * num_groups + group] =
                range_digest(parts + start, lengths + start, ends[group] - start, thread * width,
                             (thread + 1) * width, indices, block);
        }
}
