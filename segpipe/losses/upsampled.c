/* Upsampling with cross-entropy and its gradient, or with argmax and counts, on a CPU: fused.py.

   A task is a block of N columns of an image. It walks down the rows with two upsampled rows of the logits, and the
   gradients of both, in the first-level cache. What a task does depends on the task alone, so threads do not enter. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define N 64 /* columns of a task; part of the order of sums */

typedef struct {
    const float *logits;              /* (B, C, h, w) */
    const uint8_t *target;            /* (B, H, W) */
    const int32_t *row_low, *col_low; /* lower input of each output */
    const float *row_share, *col_share; /* and the share of the next one */
    const float *weights;             /* (C) */
    const float *factors;             /* (B, H, W), or NULL: 1 */
    const float *everywhere, *on_target; /* slopes (C), or NULL */
    float *losses;                    /* (B, H, W) */
    double *sums;                     /* (tasks, 3, C), or NULL */
    float *parts;                     /* (tasks, C, h, span), zeros, or NULL: no gradient */
    float *gradient;                  /* (B, C, h, w) */
    uint8_t *pred;                    /* (B, H, W) */
    int64_t images, classes, rows_in, cols_in, rows, cols, span;
    float smoothing;
    int32_t ignore_index;
} Pass;

typedef union {
    float number;
    uint32_t bits;
} Word;

/* e^x for x <= 0; 0 below -80. Source of the polynomial: Cephes, expf. */
static inline float exp_of(float x) {
    float inside = x < -80.0f ? -80.0f : x;
    Word power = {.number = inside * 1.44269504088896341f + 12582912.0f}; /* 1.5 * 2^23: rounds to an integer */
    float n = power.number - 12582912.0f;
    float r = inside - n * 0.693359375f - n * -2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    power.bits = (power.bits + 127u) << 23;
    return x < -80.0f ? 0.0f : y * power.number;
}

/* Logarithm of a number from 1 to 256, or NaN of one. Source of the polynomial: Cephes, logf. */
static inline float log_of(float x) {
    Word word = {.number = x};
    uint32_t power = (word.bits - 0x3F3504F3u) >> 23;
    word.bits -= power << 23;
    float n = (float)(int32_t)power, f = word.number - 1.0f, z = f * f;
    float y = 7.0376836292e-2f;
    y = y * f + -1.1514610310e-1f;
    y = y * f + 1.1676998740e-1f;
    y = y * f + -1.2420140846e-1f;
    y = y * f + 1.4249322787e-1f;
    y = y * f + -1.6668057665e-1f;
    y = y * f + 2.0000714765e-1f;
    y = y * f + -2.4999993993e-1f;
    y = y * f + 3.3333331174e-1f;
    y = y * f * z + n * -2.12194440e-4f - 0.5f * z;
    return f + y + n * 0.693359375f + x * 0.0f;
}

typedef struct {
    const Pass *pass;
    int64_t image, start, count, first_cell, cells; /* columns, and the columns of the logits that they touch */
    int32_t low[N];
    float share[N];
    float *memory, *upper, *lower, *to_upper, *to_lower, *strip, *probability; /* (C, N) each */
    float *cell_weights;                                         /* (cells, N) */
    int64_t held;                                                /* row of the logits in `upper`; the next in `lower` */
    int wrong;                                                   /* whether a target is neither class nor ignored */
} Block;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Returns 0 without memory. */
static int open_block(Block *block, const Pass *pass, int64_t task) {
    int64_t num = (pass->cols + N - 1) / N, size = pass->classes * N;
    block->pass = pass, block->image = task / num, block->start = task % num * N;
    block->held = -2, block->wrong = 0;
    block->count = least(N, pass->cols - block->start);
    for (int64_t i = 0; i < N; i++) {
        int64_t column = block->start + least(i, block->count - 1);
        block->low[i] = pass->col_low[column];
        block->share[i] = i < block->count ? pass->col_share[column] : 0.0f;
    }
    block->first_cell = block->low[0];
    block->cells = least(block->low[N - 1] + 1, pass->cols_in - 1) - block->first_cell + 1;
    block->memory = aligned_alloc(64, sizeof(float) * (6 * size + block->cells * N));
    if (!block->memory) return 0;
    block->upper = block->memory, block->lower = block->upper + size, block->to_upper = block->lower + size;
    block->to_lower = block->to_upper + size, block->strip = block->to_lower + size;
    block->probability = block->strip + size, block->cell_weights = block->probability + size;
    for (int64_t cell = 0; cell < block->cells; cell++)
        for (int64_t i = 0; i < N; i++) {
            int64_t low = block->low[i] - block->first_cell, high = least(low + 1, block->cells - 1);
            float weight = low == cell ? 1.0f - block->share[i] : 0.0f;
            if (high == cell) weight += block->share[i];
            block->cell_weights[cell * N + i] = i < block->count ? weight : 0.0f;
        }
    return 1;
}

static void upsample_row(const Block *block, int64_t row, float *restrict out) {
    const Pass *pass = block->pass;
    for (int64_t c = 0; c < pass->classes; c++) {
        const float *in = pass->logits + ((block->image * pass->classes + c) * pass->rows_in + row) * pass->cols_in;
        for (int64_t i = 0; i < N; i++) {
            float right = in[least(block->low[i] + 1, pass->cols_in - 1)];
            out[c * N + i] = in[block->low[i]] * (1.0f - block->share[i]) + right * block->share[i];
        }
    }
}

/* Adds the gradient of an upsampled row to that of row `row` of the logits, as far as this block goes. */
static void reduce_row(const Block *block, int64_t task, int64_t row, float *restrict from) {
    const Pass *pass = block->pass;
    float *out = pass->parts + (task * pass->classes * pass->rows_in + row) * pass->span, sum[256];
    for (int64_t cell = 0; cell < block->cells; cell++) {
        const float *weight = block->cell_weights + cell * N;
        memset(sum, 0, sizeof sum);
        for (int64_t i = 0; i < N; i++)
            if (weight[i] != 0.0f)
                for (int64_t c = 0; c < pass->classes; c++) sum[c] += from[c * N + i] * weight[i];
        for (int64_t c = 0; c < pass->classes; c++) out[c * pass->rows_in * pass->span + cell] += sum[c];
    }
    memset(from, 0, sizeof(float) * pass->classes * N);
}

static void reduce_both(const Block *block, int64_t task) {
    if (block->held < 0 || !block->pass->parts) return;
    reduce_row(block, task, block->held, block->to_upper);
    reduce_row(block, task, least(block->held + 1, block->pass->rows_in - 1), block->to_lower);
}

/* Brings the two rows of the logits that output row `row` joins. */
static void move_to(Block *block, int64_t task, int64_t row) {
    const Pass *pass = block->pass;
    int64_t wanted = pass->row_low[row];
    if (wanted == block->held) return;
    if (wanted == block->held + 1) {
        if (pass->parts) reduce_row(block, task, block->held, block->to_upper);
        float *upper = block->upper, *to_upper = block->to_upper;
        block->upper = block->lower, block->lower = upper;
        block->to_upper = block->to_lower, block->to_lower = to_upper;
    } else {
        reduce_both(block, task);
        upsample_row(block, wanted, block->upper);
    }
    upsample_row(block, least(wanted + 1, pass->rows_in - 1), block->lower);
    block->held = wanted;
}

/* Logits of an output row into the strip, and the largest of each pixel. A NaN is not larger than any. */
static inline void logits_of(const Block *block, float share, float *restrict top) {
    const float *restrict upper = block->upper, *restrict lower = block->lower;
    float *restrict strip = block->strip, rest = 1.0f - share;
    for (int64_t i = 0; i < N; i++) top[i] = strip[i] = upper[i] * rest + lower[i] * share;
    for (int64_t c = 1; c < block->pass->classes; c++)
        for (int64_t i = 0; i < N; i++) {
            float logit = upper[c * N + i] * rest + lower[c * N + i] * share;
            strip[c * N + i] = logit;
            top[i] = logit > top[i] ? logit : top[i];
        }
}

typedef struct {
    uint8_t id[N];                /* class, 0 where ignored */
    float on_target[N], even[N];  /* what the loss gives the class and all classes; 0 where ignored */
    float factor[N], valid[N], sum[N], slope[N];
} Pixels;

/* Whether any pixel of the row counts in what is asked for. */
static int read_pixels(Block *block, int64_t row, Pixels *pixels) {
    const Pass *pass = block->pass;
    int64_t place = (block->image * pass->rows + row) * pass->cols + block->start;
    float even = pass->smoothing / (float)pass->classes, counts = 0.0f;
    for (int64_t i = 0; i < N; i++) {
        int id = i < block->count ? pass->target[place + i] : pass->ignore_index;
        int valid = id != pass->ignore_index && id < pass->classes;
        block->wrong |= id != pass->ignore_index && !valid;
        pixels->id[i] = (uint8_t)(valid ? id : 0);
        pixels->valid[i] = valid ? 1.0f : 0.0f;
        pixels->on_target[i] = valid ? (1.0f - pass->smoothing) * pass->weights[id] : 0.0f;
        pixels->even[i] = valid ? even : 0.0f;
        pixels->factor[i] = !valid ? 0.0f : pass->factors ? pass->factors[place + i] : 1.0f;
        counts += pixels->factor[i] != 0.0f ? 1.0f : 0.0f;
        pixels->sum[i] = pixels->slope[i] = 0.0f;
    }
    return !pass->factors || pass->sums || pass->everywhere || counts > 0.0f;
}

/* Turns logits into exponentials of their distance to the largest, and finds losses. */
static void exponentials(const Block *block, int64_t row, Pixels *pixels, const float *restrict top) {
    const Pass *pass = block->pass;
    float *restrict strip = block->strip, *restrict sum = pixels->sum, at_target[N], even[N] = {0}, losses[N];
    float total = 0.0f;
    for (int64_t i = 0; i < N; i++) at_target[i] = strip[pixels->id[i] * N + i] - top[i];
    for (int64_t c = 0; c < pass->classes; c++) {
        total += pass->weights[c];
        if (pass->smoothing != 0.0f)
            for (int64_t i = 0; i < N; i++) even[i] += pass->weights[c] * (strip[c * N + i] - top[i]);
        for (int64_t i = 0; i < N; i++) {
            strip[c * N + i] = exp_of(strip[c * N + i] - top[i]);
            sum[i] += strip[c * N + i];
        }
    }
    for (int64_t i = 0; i < N; i++) {
        float log_sum = log_of(sum[i]);
        float loss = pixels->on_target[i] * (log_sum - at_target[i]);
        if (pass->smoothing != 0.0f) loss += pixels->even[i] * (total * log_sum - even[i]);
        losses[i] = pixels->valid[i] != 0.0f ? loss : 0.0f;
    }
    memcpy(pass->losses + (block->image * pass->rows + row) * pass->cols + block->start, losses,
           sizeof(float) * block->count);
}

/* Adds probabilities of a row to those of its columns, and these to the sums of the task after every 16th row. */
static void add_sums(const Block *block, int64_t task, int64_t row, const Pixels *pixels) {
    const Pass *pass = block->pass;
    double *common = pass->sums + task * 3 * pass->classes, *all = common + pass->classes, *size = all + pass->classes;
    const float *restrict strip = block->strip;
    float *restrict probability = block->probability, share[N];
    for (int64_t i = 0; i < N; i++) share[i] = pixels->valid[i] / pixels->sum[i];
    for (int64_t c = 0; c < pass->classes; c++)
        for (int64_t i = 0; i < N; i++) probability[c * N + i] += strip[c * N + i] * share[i];
    for (int64_t i = 0; i < N; i++) {
        common[pixels->id[i]] += strip[pixels->id[i] * N + i] * share[i];
        size[pixels->id[i]] += pixels->valid[i];
    }
    if (row % 16 != 15 && row != pass->rows - 1) return;
    for (int64_t c = 0; c < pass->classes; c++)
        for (int64_t i = 0; i < N; i++) all[c] += probability[c * N + i], probability[c * N + i] = 0.0f;
}

/* Turns exponentials into the gradient of the logits of a row, and adds it to that of the two rows they come from. */
static void add_gradient(const Block *block, Pixels *pixels, float share) {
    const Pass *pass = block->pass;
    float *restrict strip = block->strip, *restrict to_upper = block->to_upper, *restrict to_lower = block->to_lower;
    float along[N], rest = 1.0f - share, total = 0.0f;
    for (int64_t c = 0; c < pass->classes; c++) total += pass->weights[c];
    for (int64_t i = 0; i < N; i++) {
        pixels->on_target[i] *= pixels->factor[i], pixels->even[i] *= pixels->factor[i];
        pixels->sum[i] = 1.0f / pixels->sum[i];
        along[i] = (pixels->on_target[i] + pixels->even[i] * total) * pixels->sum[i];
    }
    if (pass->everywhere) {
        float mean[N] = {0};
        for (int64_t c = 0; c < pass->classes; c++)
            for (int64_t i = 0; i < N; i++) mean[i] += pass->everywhere[c] * (strip[c * N + i] * pixels->sum[i]);
        for (int64_t i = 0; i < N; i++) {
            pixels->slope[i] = pass->on_target[pixels->id[i]] * (strip[pixels->id[i] * N + i] * pixels->sum[i]);
            along[i] -= (mean[i] + pixels->slope[i]) * pixels->valid[i] * pixels->sum[i];
            pixels->on_target[i] -= pixels->slope[i] * pixels->valid[i];
            pixels->sum[i] *= pixels->valid[i];
        }
    }
    for (int64_t c = 0; c < pass->classes; c++) {
        if (pass->everywhere)
            for (int64_t i = 0; i < N; i++)
                strip[c * N + i] *= along[i] + pass->everywhere[c] * pixels->sum[i];
        else
            for (int64_t i = 0; i < N; i++) strip[c * N + i] *= along[i];
        if (pass->smoothing != 0.0f)
            for (int64_t i = 0; i < N; i++) strip[c * N + i] -= pixels->even[i] * pass->weights[c];
    }
    for (int64_t i = 0; i < N; i++) strip[pixels->id[i] * N + i] -= pixels->on_target[i];
    for (int64_t k = 0; k < pass->classes * N; k++) {
        to_upper[k] += strip[k] * rest;
        to_lower[k] += strip[k] * share;
    }
}

/* One task. Returns 1, 0 without memory, or -1 for a target that is no class. */
static int losses_of(const Pass *pass, int64_t task) {
    Pixels pixels;
    float top[N];
    Block block;
    if (!open_block(&block, pass, task)) return 0;
    memset(block.to_upper, 0, sizeof(float) * 4 * pass->classes * N); /* and strip and probability */
    for (int64_t row = 0; row < pass->rows; row++) {
        if (!read_pixels(&block, row, &pixels)) {
            float *losses = pass->losses + (block.image * pass->rows + row) * pass->cols + block.start;
            memset(losses, 0, sizeof(float) * block.count);
            continue;
        }
        move_to(&block, task, row);
        logits_of(&block, pass->row_share[row], top);
        exponentials(&block, row, &pixels, top);
        if (pass->sums) add_sums(&block, task, row, &pixels);
        if (pass->parts) add_gradient(&block, &pixels, pass->row_share[row]);
    }
    reduce_both(&block, task);
    free(block.memory);
    return block.wrong ? -1 : 1;
}

/* Tasks 0 to `tasks - 1`. Returns the least that losses_of returned. */
int segpipe_losses(const Pass *pass, int64_t tasks, int64_t threads) {
    int code = 1;
#pragma omp parallel for num_threads(threads) reduction(min : code)
    for (int64_t task = 0; task < tasks; task++) {
        int found = losses_of(pass, task);
        code = found < code ? found : code;
    }
    return code;
}

/* Adds up what the blocks of columns found for each of `planes` (image, class) of the gradient. */
void segpipe_join(const Pass *pass, int64_t planes, int64_t threads) {
    int64_t num = (pass->cols + N - 1) / N, size = pass->rows_in * pass->cols_in;
#pragma omp parallel for num_threads(threads)
    for (int64_t plane = 0; plane < planes; plane++) {
        memset(pass->gradient + plane * size, 0, sizeof(float) * size);
        for (int64_t block = 0; block < num; block++) {
            int64_t task = plane / pass->classes * num + block, end = least((block + 1) * N, pass->cols) - 1;
            int64_t start = pass->col_low[block * N], cells = least(pass->col_low[end] + 1, pass->cols_in - 1) - start + 1;
            for (int64_t row = 0; row < pass->rows_in; row++) {
                const float *from =
                    pass->parts + ((task * pass->classes + plane % pass->classes) * pass->rows_in + row) * pass->span;
                float *out = pass->gradient + plane * size + row * pass->cols_in + start;
                for (int64_t cell = 0; cell < cells; cell++) out[cell] += from[cell];
            }
        }
    }
}

/* Most probable class of each pixel of one task, the first of equal ones, a NaN before all; counts int64 (256, C) by
   target and class are added to. Returns 1, or 0 without memory. */
static int classes_of(const Pass *pass, int64_t task, int64_t *counts) {
    float top[N];
    int32_t best[N];
    Block block;
    if (!open_block(&block, pass, task)) return 0;
    for (int64_t row = 0; row < pass->rows; row++) {
        move_to(&block, task, row);
        float share = pass->row_share[row], rest = 1.0f - share;
        for (int64_t i = 0; i < N; i++) top[i] = block.upper[i] * rest + block.lower[i] * share, best[i] = 0;
        for (int64_t c = 1; c < pass->classes; c++)
            for (int64_t i = 0; i < N; i++) {
                float logit = block.upper[c * N + i] * rest + block.lower[c * N + i] * share;
                int larger = (logit > top[i]) | ((logit != logit) & (top[i] == top[i]));
                best[i] = larger ? (int32_t)c : best[i];
                top[i] = larger ? logit : top[i];
            }
        int64_t place = (block.image * pass->rows + row) * pass->cols + block.start;
        for (int64_t i = 0; i < block.count; i++) {
            pass->pred[place + i] = (uint8_t)best[i];
            if (pass->target) counts[pass->target[place + i] * pass->classes + best[i]]++;
        }
    }
    free(block.memory);
    return 1;
}

/* classes_of tasks 0 to `tasks - 1`; counts int64 (threads, 256, C). Returns the least that classes_of returned. */
int segpipe_classes(const Pass *pass, int64_t tasks, int64_t threads, int64_t *counts) {
    int code = 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(min : code)
    for (int64_t thread = 0; thread < threads; thread++)
        for (int64_t task = tasks * thread / threads; task < tasks * (thread + 1) / threads; task++) {
            int found = classes_of(pass, task, counts + thread * 256 * pass->classes);
            code = found < code ? found : code;
        }
    return code;
}
