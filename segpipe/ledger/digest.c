/* Sums of mix64(word xor index) over blocks of words that lie in several places: digest.py, on a CPU. */

#include <stdint.h>

typedef uint64_t word __attribute__((aligned(1))); /* a tensor inside a larger one may begin anywhere */

static inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* The sum over some words of a block, of which `indices` holds mix64(i * phi). */
static inline uint64_t part_sum(const word *words, const uint64_t *indices, int64_t count) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++) sum += mix64(words[i] ^ indices[i]);
    return sum;
}

/* The words of `parts` continue each other. Those from `first`, a multiple of `block`, up to `last` are taken: a sum
   for each block, the last of which may be short. */
void segpipe_block_sums(const word *const *parts, const int64_t *lengths, int64_t num_parts, int64_t first,
                        int64_t last, const uint64_t *indices, int64_t block, uint64_t *sums) {
    int64_t place = 0, filled = 0;
    uint64_t total = 0;
    for (int64_t part = 0; part < num_parts && place < last; place += lengths[part], part++) {
        int64_t begin = first > place ? first - place : 0;
        int64_t end = lengths[part] < last - place ? lengths[part] : last - place;
        const word *words = parts[part];
        while (begin < end) {
            int64_t count = end - begin < block - filled ? end - begin : block - filled;
            total += part_sum(words + begin, indices + filled, count);
            begin += count;
            filled += count;
            if (filled == block) {
                *sums++ = total;
                total = 0;
                filled = 0;
            }
        }
    }
    if (filled) *sums = total;
}

/* The digest of each group of parts, whose words continue each other: over the sums of its blocks, as over words.
   Group g ends before part ends[g]. */
void segpipe_group_digests(const word *const *parts, const int64_t *lengths, const int64_t *ends, int64_t num_groups,
                           const uint64_t *indices, int64_t block, uint64_t *digests) {
    int64_t part = 0;
    for (int64_t group = 0; group < num_groups; group++) {
        int64_t filled = 0, blocks = 0;
        uint64_t total = 0, digest = 0;
        for (; part < ends[group]; part++) {
            const word *words = parts[part];
            for (int64_t begin = 0; begin < lengths[part];) {
                int64_t left = lengths[part] - begin, count = left < block - filled ? left : block - filled;
                total += part_sum(words + begin, indices + filled, count);
                begin += count;
                filled += count;
                if (filled == block) {
                    digest += mix64(total ^ indices[blocks++]);
                    total = 0;
                    filled = 0;
                }
            }
        }
        if (filled) digest += mix64(total ^ indices[blocks]);
        digests[group] = digest;
    }
}
