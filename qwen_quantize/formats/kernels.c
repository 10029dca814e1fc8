/* Casts between float32 and narrow formats: the same bits as twin.py, at the speed of memory.
 *
 * Everything is integer arithmetic on the bits of a float32, without branches inside the loops, so that a compiler
 * vectorises them. See grid.py for ranks, shifts and limits; `struct grid` is its image. Each loop exists once per
 * kind of rounding: the functions marked INLINE take the kind as a constant.
 *
 * Build with -ffp-contract=off (the error sums must not depend on whether the machine has fused multiply-add) and
 * -fno-strict-aliasing: float32 arrays are read as their bits.
 */
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { RNE, LINEAR, ODD, STOCHASTIC, HYBRID }; /* LINEAR: adds a constant part of the last place: RNA, RTZ, ... */

/* STRIP is a multiple of LANES. AHEAD: elements between reading and fetching; twice the speed where the machine's own
 * fetching stops at each 4096-byte page. */
enum { LANES = 8, STRIP = 512, PIECES = 8, NAN_RANK = 255, AHEAD = 4096 };

typedef struct grid {
    int32_t rounding;
    int32_t mantissa_bits, min_exponent; /* the exponent is biased by 127 */
    uint32_t max_rank, limit_positive, limit_negative, infinity_positive, infinity_negative, flush_below;
    uint32_t half_mask, positive_mask, negative_mask; /* LINEAR: which of half, rest are added, as masks */
    uint32_t sign_code, zero_sign_code, nan_code, nan_code_sign; /* codes: the sign bit of values, of zero, of NaN */
    uint32_t integer;                                            /* all ones for two's complement, else zero */
    uint32_t zero_sign, nan_bits, nan_sign, beyond_bits, beyond_sign; /* float32 bits; beyond: above max_rank */
    uint32_t seed_low, seed_high;
    uint32_t tapered;
    int32_t piece_exponent[PIECES]; /* biased; unused ones INT32_MAX */
    int32_t piece_mantissa_bits[PIECES];
    uint32_t piece_base[PIECES]; /* rank = base + ((exponent - piece exponent) << mantissa bits) + significand part */
    const uint32_t *codes, *values; /* tapered only: [512], by rank + 256 * negative; rank 255 is NaN */
} grid;

INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
INLINE uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
INLINE int32_t max_i32(int32_t a, int32_t b) { return a > b ? a : b; }
INLINE int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }

INLINE uint32_t mix(uint32_t x) {
    x ^= x >> 16; x *= 0x7feb352dU; x ^= x >> 15; x *= 0x846ca68bU; return x ^ (x >> 16);
}

INLINE uint32_t random_word(uint32_t low, uint32_t high, uint32_t seed_low, uint32_t seed_high) {
    return mix(mix(low ^ seed_low) + ((high * 0x9e3779b9U) ^ seed_high));
}

/* The rank of the float32 with bits u, times 2^-k. `word` is used by STOCHASTIC only. With `normalize` float32
 * subnormals get a leading one first, which is needed when scaling makes them normal. */
INLINE uint32_t rank_of(const grid g, uint32_t u, int32_t k, uint32_t word, const int rounding, const int tapered,
                        const int normalize) {
    uint32_t a = u & 0x7fffffffU;
    int32_t field = (int32_t)(a >> 23);
    uint32_t significand = (a & 0x7fffffU) | (field != 0 ? 0x800000U : 0U);
    field = max_i32(field, 1);
    if (normalize && a < 0x800000U) { /* zero gets an exponent far below all others */
        uint32_t n = bits_of((float)(int32_t)a);
        field = (int32_t)(n >> 23) - 149;
        significand = a != 0 ? (n & 0x7fffffU) | 0x800000U : 0;
    }
    field -= k;
    int32_t above = field - g.min_exponent;
    int32_t below = max_i32(-above, 0);
    int32_t shift; /* not yet cut to 31 */
    uint32_t base;
    if (tapered) {
        int32_t mantissa_bits = 0, start = g.min_exponent;
        base = 0;
        for (int p = 0; p < PIECES; p++) { /* selects, no lookup: few compilers vectorise a lookup */
            int inside = field >= g.piece_exponent[p];
            mantissa_bits = inside ? g.piece_mantissa_bits[p] : mantissa_bits;
            start = inside ? g.piece_exponent[p] : start;
            base = inside ? g.piece_base[p] : base;
        }
        shift = 23 - mantissa_bits + below;
        base += (uint32_t)max_i32(field - start, 0) << mantissa_bits;
    } else {
        shift = 23 - g.mantissa_bits + below;
        base = (uint32_t)max_i32(above, 0) << g.mantissa_bits;
    }
    uint32_t s = (uint32_t)min_i32(shift, 31);
    uint32_t truncated = base + (significand >> s);
    uint32_t half = 1U << (s - 1), rest = (1U << s) - 1, rank;
    if (rounding == RNE) {
        rank = base + ((significand + half - 1 + (truncated & 1)) >> s);
    } else if (rounding == LINEAR) {
        uint32_t added = (half & g.half_mask) | (rest & ((u >> 31) != 0 ? g.negative_mask : g.positive_mask));
        rank = base + ((significand + added) >> s);
    } else if (rounding == ODD) {
        rank = truncated | ((significand & rest) != 0 ? 1U : 0U);
    } else if (rounding == STOCHASTIC) {
        uint32_t left = significand << ((uint32_t)(32 - shift) & 31);
        uint32_t right = significand >> (uint32_t)max_i32(min_i32(shift - 32, 31), 0);
        uint32_t fraction = shift < 32 ? left : right;
        rank = truncated + (fraction + word < word ? 1U : 0U);
    } else {
        uint32_t below_kept = (significand >> (s - 14)) & 0x3fffU;
        uint32_t seeded = truncated + (below_kept >= (significand & 0x3fffU) ? 1U : 0U);
        seeded = shift > 24 ? 0 : seeded;
        rank = s == 20 ? base + ((significand + half) >> s) : seeded;
    }
    uint32_t negative = 0U - (u >> 31);
    uint32_t limit = (g.limit_negative & negative) | (g.limit_positive & ~negative);
    uint32_t of_infinity = (g.infinity_negative & negative) | (g.infinity_positive & ~negative);
    rank = min_u32(rank, limit);
    rank = a == 0x7f800000U ? of_infinity : rank;
    return rank < g.flush_below ? 0 : rank;
}

INLINE uint32_t code_of(const grid g, uint32_t u, uint32_t rank) {
    uint32_t negative = 0U - (u >> 31); /* all ones or zero */
    uint32_t sign = negative & (rank == 0 ? g.zero_sign_code : g.sign_code);
    uint32_t minus = negative & g.integer; /* two's complement: ~rank + 1 */
    uint32_t code = (rank ^ minus) - minus;
    return (u & 0x7fffffffU) > 0x7f800000U ? g.nan_code | (negative & g.nan_code_sign) : code | sign;
}

INLINE uint32_t value_of(const grid g, uint32_t u, uint32_t rank, float step, uint32_t first_normal) {
    uint32_t sign = u & 0x80000000U;
    uint32_t moved = (rank << (23 - g.mantissa_bits)) + ((uint32_t)(g.min_exponent - 1) << 23);
    uint32_t value = rank < first_normal ? bits_of((float)(int32_t)rank * step) : moved;
    value |= sign & (rank == 0 ? g.zero_sign : 0x80000000U);
    value = rank > g.max_rank ? g.beyond_bits | (sign & g.beyond_sign) : value;
    return (u & 0x7fffffffU) > 0x7f800000U ? g.nan_bits | (sign & g.nan_sign) : value;
}

INLINE uint32_t table_index(uint32_t u, uint32_t rank) {
    return ((u & 0x7fffffffU) > 0x7f800000U ? NAN_RANK : rank) + (u >> 31) * 256;
}

INLINE uint32_t word_at(const grid g, uint64_t i, const int rounding) {
    return rounding == STOCHASTIC ? random_word((uint32_t)i, (uint32_t)(i >> 32), g.seed_low, g.seed_high) : 0;
}

/* Both loops work in strips: codes are made 32 bits wide and narrowed in a loop of their own, and the table lookups of
 * tapered formats have one too, because compilers do not vectorise the whole otherwise. */
INLINE void encode_loop(const grid g, const uint32_t *restrict x, uint8_t *restrict out, int64_t n, int32_t k,
                        uint64_t first, const int rounding, const int tapered, const int normalize) {
    uint32_t wide[STRIP];
    for (int64_t begin = 0; begin < n; begin += STRIP) {
        int64_t count = n - begin < STRIP ? n - begin : STRIP;
        for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(x + begin + i + AHEAD);
        for (int64_t i = 0; i < count; i++) {
            uint32_t u = x[begin + i];
            uint32_t word = word_at(g, first + (uint64_t)(begin + i), rounding);
            uint32_t rank = rank_of(g, u, k, word, rounding, tapered, normalize);
            wide[i] = tapered ? table_index(u, rank) : code_of(g, u, rank);
        }
        if (tapered) for (int64_t i = 0; i < count; i++) out[begin + i] = (uint8_t)g.codes[wide[i]];
        else for (int64_t i = 0; i < count; i++) out[begin + i] = (uint8_t)wide[i];
    }
}

/* x and out may be the same array. */
INLINE void quantize_loop(const grid g, const uint32_t *x, uint32_t *out, int64_t n, int32_t k, float scale,
                          uint64_t first, const int rounding, const int tapered, const int normalize) {
    int fields_match = g.min_exponent == 1; /* bfloat16: ranks are the top bits of a float32 as they are */
    float step = fields_match ? 0.0f : float_of((uint32_t)(g.min_exponent - g.mantissa_bits) << 23);
    uint32_t first_normal = fields_match ? 0 : 1U << g.mantissa_bits;
    uint32_t wide[STRIP];
    for (int64_t begin = 0; begin < n; begin += STRIP) {
        int64_t count = n - begin < STRIP ? n - begin : STRIP;
        for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(x + begin + i + AHEAD);
        for (int64_t i = 0; i < count; i++) {
            uint32_t u = x[begin + i];
            uint32_t word = word_at(g, first + (uint64_t)(begin + i), rounding);
            uint32_t rank = rank_of(g, u, k, word, rounding, tapered, normalize);
            wide[i] = tapered ? table_index(u, rank) : value_of(g, u, rank, step, first_normal);
        }
        if (tapered) for (int64_t i = 0; i < count; i++) wide[i] = g.values[wide[i]];
        for (int64_t i = 0; i < count; i++) out[begin + i] = bits_of(float_of(wide[i]) * scale);
    }
}

/* Whether 2^-k makes float32 subnormals normal in the format. */
INLINE int must_normalize(const grid *g, int32_t k) { return k < 1 - g->min_exponent; }

#define DISPATCH(LOOP, g, normalize, ...)                                          \
    switch ((g)->rounding * 2 + (int)(g)->tapered) {                               \
        case RNE * 2: LOOP(*(g), __VA_ARGS__, RNE, 0, normalize); break;               \
        case RNE * 2 + 1: LOOP(*(g), __VA_ARGS__, RNE, 1, normalize); break;           \
        case LINEAR * 2: LOOP(*(g), __VA_ARGS__, LINEAR, 0, normalize); break;         \
        case LINEAR * 2 + 1: LOOP(*(g), __VA_ARGS__, LINEAR, 1, normalize); break;     \
        case ODD * 2: LOOP(*(g), __VA_ARGS__, ODD, 0, normalize); break;               \
        case ODD * 2 + 1: LOOP(*(g), __VA_ARGS__, ODD, 1, normalize); break;           \
        case STOCHASTIC * 2: LOOP(*(g), __VA_ARGS__, STOCHASTIC, 0, normalize); break; \
        case STOCHASTIC * 2 + 1: LOOP(*(g), __VA_ARGS__, STOCHASTIC, 1, normalize); break; \
        default: LOOP(*(g), __VA_ARGS__, HYBRID, 1, normalize);                        \
    }

static void encode_run(const grid *g, const uint32_t *x, uint8_t *out, int64_t n, int32_t k, uint64_t first) {
    if (must_normalize(g, k)) { DISPATCH(encode_loop, g, 1, x, out, n, k, first) }
    else { DISPATCH(encode_loop, g, 0, x, out, n, k, first) }
}

static void quantize_run(const grid *g, const uint32_t *x, uint32_t *out, int64_t n, int32_t k, uint64_t first,
                         float scale) {
    if (must_normalize(g, k)) { DISPATCH(quantize_loop, g, 1, x, out, n, k, scale, first) }
    else { DISPATCH(quantize_loop, g, 0, x, out, n, k, scale, first) }
}

INLINE float power_of_two(int32_t k) { /* -127 .. 127 */
    return float_of(k == -127 ? 0x400000U : (uint32_t)(k + 127) << 23);
}

/* ---- threads: the items 0 .. n-1 in runs, each taken by whoever is free; the caller works too ---- */

typedef struct pool {
    void (*work)(const void *, int64_t, int64_t);
    const void *task;
    int64_t n, runs, next;
} pool;

enum { MAX_THREADS = 256, RUNS_PER_THREAD = 8 };

static void *take_runs(void *argument) {
    pool *p = argument;
    for (;;) {
        int64_t run = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED);
        if (run >= p->runs) return 0;
        p->work(p->task, p->n * run / p->runs, p->n * (run + 1) / p->runs);
    }
}

static void parallel(void (*work)(const void *, int64_t, int64_t), const void *task, int64_t n, int32_t threads) {
    if (n <= 0) return;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads > n) threads = (int32_t)n;
    if (threads <= 1) { work(task, 0, n); return; }
    int64_t runs = (int64_t)threads * RUNS_PER_THREAD;
    pool p = {work, task, n, runs < n ? runs : n, 0};
    pthread_t ids[MAX_THREADS];
    int32_t started = 0;
    while (started < threads - 1 && pthread_create(&ids[started], 0, take_runs, &p) == 0) started++;
    take_runs(&p);
    for (int32_t t = 0; t < started; t++) pthread_join(ids[t], 0);
}

enum { PIECE = 4096 }; /* elements handed out together by the elementwise kernels */

INLINE int64_t pieces(int64_t n) { return (n + PIECE - 1) / PIECE; }
INLINE int64_t end_of(int64_t piece, int64_t n) { int64_t e = piece * PIECE; return e < n ? e : n; }

/* ---- elementwise ---- */

typedef struct { const grid *g; const uint32_t *x; void *out; int64_t n; int32_t to_codes; } cast_task;

static void cast_work(const void *p, int64_t begin, int64_t end) {
    const cast_task *t = p;
    int64_t i = begin * PIECE, n = end_of(end, t->n) - i;
    if (t->to_codes) encode_run(t->g, t->x + i, (uint8_t *)t->out + i, n, 0, (uint64_t)i);
    else quantize_run(t->g, t->x + i, (uint32_t *)t->out + i, n, 0, (uint64_t)i, 1.0f);
}

/* Codes (bytes) or values (float32) of x. */
void qq_cast(const grid *g, const uint32_t *x, void *out, int64_t n, int32_t to_codes, int32_t threads) {
    cast_task t = {g, x, out, n, to_codes};
    parallel(cast_work, &t, pieces(n), threads);
}

typedef struct { const uint8_t *codes; float *out; int64_t n; const float *table; } decode_task;

static void decode_work(const void *p, int64_t begin, int64_t end) {
    const decode_task *t = p;
    int64_t stop = end_of(end, t->n);
    for (int64_t i = begin * PIECE; i < stop; i++) t->out[i] = t->table[t->codes[i]];
}

void qq_decode(const uint8_t *codes, float *out, int64_t n, const float *table, int32_t threads) {
    decode_task t = {codes, out, n, table};
    parallel(decode_work, &t, pieces(n), threads);
}

/* ---- activations: per row and group, largest magnitude -> exponent -> cast -> scale back ---- */

typedef struct {
    const grid *g; const uint32_t *x; float *out; int64_t columns, group, groups;
    int32_t offset; uint32_t fraction_threshold;
} groups_task;

INLINE int32_t exponent_of(uint32_t amax, int32_t offset, uint32_t fraction_threshold) {
    if (amax == 0) return 0;
    int32_t bias = 127;
    if (amax < 0x800000U) { amax = bits_of((float)(int32_t)amax); bias = 127 + 149; }
    int32_t e = (int32_t)(amax >> 23) - bias - offset + ((amax & 0x7fffffU) > fraction_threshold ? 1 : 0);
    return max_i32(min_i32(e, 127), -127);
}

static void groups_work(const void *p, int64_t begin, int64_t end) {
    const groups_task *t = p;
    const grid g = *t->g;
    int64_t row = begin / t->groups, column = (begin % t->groups) * t->group;
    for (int64_t item = begin; item < end; item++) {
        int64_t at = row * t->columns + column;
        int64_t n = t->columns - column < t->group ? t->columns - column : t->group;
        const uint32_t *x = t->x + at;
        uint32_t amax = 0;
        for (int64_t i = 0; i < n; i++) {
            uint32_t a = x[i] & 0x7fffffffU;
            amax = a > amax ? a : amax;
        }
        if (amax >= 0x7f800000U) {
            for (int64_t i = 0; i < n; i++) t->out[at + i] = float_of(0x7fc00000U);
        } else {
            int32_t k = exponent_of(amax, t->offset, t->fraction_threshold);
            quantize_run(&g, x, (uint32_t *)t->out + at, n, k, (uint64_t)at, power_of_two(k));
        }
        column += t->group;
        if (column >= t->columns) { column = 0; row++; }
    }
}

void qq_fake_quantize_groups(const grid *g, const uint32_t *x, float *out, int64_t rows, int64_t columns, int64_t group,
                             int32_t offset, uint32_t fraction_threshold, int32_t threads) {
    int64_t groups = (columns + group - 1) / group;
    groups_task t = {g, x, out, columns, group, groups, offset, fraction_threshold};
    parallel(groups_work, &t, rows * groups, threads);
}

/* ---- activations: per row and group, largest magnitude -> scale with a mantissa -> cast -> scale back ---- */

typedef struct {
    const grid *g, *scale_grid, *path; const uint32_t *x; float *out, *scales; const float *outer;
    int64_t columns, group, groups; float target, smallest; int32_t reciprocal, scaled;
} scaled_task;

/* Values that the grid has to cast: x over its scale, no larger than the target; also through the type on the way. */
INLINE void scale_down(const scaled_task *t, const float *x, float *out, int64_t n, float factor, float total) {
    float high = t->target;
    if (t->reciprocal) for (int64_t i = 0; i < n; i++) out[i] = x[i] * factor;
    else for (int64_t i = 0; i < n; i++) out[i] = x[i] / total;
    for (int64_t i = 0; i < n; i++) {
        float v = out[i];
        v = v > high ? high : v;
        out[i] = v < -high ? -high : v;
    }
    if (t->path) quantize_run(t->path, (const uint32_t *)out, (uint32_t *)out, n, 0, 0, 1.0f);
}

static void scaled_work(const void *p, int64_t begin, int64_t end) {
    const scaled_task *t = p;
    float strip[STRIP];
    for (int64_t item = begin; item < end; item++) {
        int64_t row = item / t->groups, column = (item % t->groups) * t->group;
        int64_t at = row * t->columns + column;
        int64_t n = t->columns - column < t->group ? t->columns - column : t->group;
        const uint32_t *x = t->x + at;
        uint32_t bits = 0;
        for (int64_t i = 0; i < n; i++) {
            uint32_t a = x[i] & 0x7fffffffU;
            bits = a > bits ? a : bits;
        }
        if (bits >= 0x7f800000U) {
            for (int64_t i = 0; i < n; i++) t->out[at + i] = float_of(0x7fc00000U);
            t->scales[item] = float_of(0x7fc00000U);
            continue;
        }
        float amax = float_of(bits), outer = t->outer ? t->outer[row] : 1.0f;
        float scale = amax / t->target;
        if (t->outer) scale = scale / outer;
        int floored = !(scale > t->smallest);
        float factor = floored ? 1.0f / t->smallest : t->target / amax;
        scale = floored ? t->smallest : scale;
        if (t->scale_grid) {
            uint32_t rounded = bits_of(scale);
            quantize_run(t->scale_grid, &rounded, &rounded, 1, 0, 0, 1.0f);
            scale = float_of(rounded);
        }
        float total = scale * outer;
        t->scales[item] = scale;
        if (total == 0.0f) {
            for (int64_t i = 0; i < n; i++) t->out[at + i] = 0.0f;
            continue;
        }
        for (int64_t i = 0; i < n; i += STRIP) {
            int64_t count = n - i < STRIP ? n - i : STRIP;
            scale_down(t, (const float *)x + i, strip, count, factor, total);
            quantize_run(t->g, (const uint32_t *)strip, (uint32_t *)t->out + at + i, count, 0, (uint64_t)(at + i),
                         t->scaled ? scale : 1.0f);
        }
    }
}

/* scale_grid, path, outer may be null. scales: one for each row and group; outer: one for each row. */
void qq_quantize_scaled(const grid *g, const grid *scale_grid, const grid *path, const uint32_t *x, float *out,
                        float *scales, const float *outer, int64_t rows, int64_t columns, int64_t group, float target,
                        float smallest, int32_t reciprocal, int32_t scaled, int32_t threads) {
    int64_t groups = (columns + group - 1) / group;
    scaled_task t = {g, scale_grid, path, x, out, scales, outer, columns, group, groups, target, smallest, reciprocal,
                     scaled};
    parallel(scaled_work, &t, rows * groups, threads);
}

/* ---- weights: tiles of block_rows x block_columns, each with its exponent ---- */

typedef struct {
    const grid *g; const uint32_t *weight; const uint8_t *codes; void *out;
    int64_t rows, columns, block_rows, block_columns, grid_columns, blocks;
    const int32_t *exponents; int64_t candidates;
    const float *scale, *table, *column_weight;
} blocks_task;

INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE blocks_task tiles(int64_t rows, int64_t columns, int64_t block_rows, int64_t block_columns) {
    int64_t across = (columns + block_columns - 1) / block_columns, down = (rows + block_rows - 1) / block_rows;
    return (blocks_task){.rows = rows, .columns = columns, .block_rows = block_rows, .block_columns = block_columns,
                         .grid_columns = across, .blocks = across * down};
}

static void quantize_rows(const void *p, int64_t begin, int64_t end) {
    const blocks_task *t = p;
    const grid g = *t->g;
    for (int64_t row = begin; row < end; row++)
        for (int64_t b = 0; b < t->grid_columns; b++) {
            int64_t at = row * t->columns + b * t->block_columns;
            int64_t n = min_i64(t->block_columns, t->columns - b * t->block_columns);
            int32_t k = t->exponents[row / t->block_rows * t->grid_columns + b];
            encode_run(&g, t->weight + at, (uint8_t *)t->out + at, n, k, (uint64_t)at);
        }
}

void qq_quantize_blocks(const grid *g, const uint32_t *weight, uint8_t *out, int64_t rows, int64_t columns,
                        const int32_t *exponents, int64_t block_rows, int64_t block_columns, int32_t threads) {
    blocks_task t = tiles(rows, columns, block_rows, block_columns);
    t.g = g, t.weight = weight, t.out = out, t.exponents = exponents;
    parallel(quantize_rows, &t, rows, threads);
}

static void dequantize_rows(const void *p, int64_t begin, int64_t end) {
    const blocks_task *t = p;
    float *out = t->out;
    for (int64_t row = begin; row < end; row++)
        for (int64_t b = 0; b < t->grid_columns; b++) {
            int64_t at = row * t->columns + b * t->block_columns;
            int64_t n = min_i64(t->block_columns, t->columns - b * t->block_columns);
            float scale = t->scale[row / t->block_rows * t->grid_columns + b];
            for (int64_t i = at; i < at + n; i++) out[i] = t->table[t->codes[i]] * scale;
        }
}

void qq_dequantize_blocks(const uint8_t *codes, float *out, int64_t rows, int64_t columns, const float *scale,
                          int64_t block_rows, int64_t block_columns, const float *table, int32_t threads) {
    blocks_task t = tiles(rows, columns, block_rows, block_columns);
    t.codes = codes, t.out = out, t.scale = scale, t.table = table;
    parallel(dequantize_rows, &t, rows, threads);
}

/* Adds column_weight * (w - q)^2 to lane (column mod LANES); the order is rows, then columns, whatever the machine. */
INLINE void add_errors(double *lanes, const float *w, const float *q, const float *column_weight, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) {
            double d = (double)w[i + l] - (double)q[i + l];
            double square = d * d;
            lanes[l] += column_weight ? (double)column_weight[i + l] * square : square;
        }
    for (int l = 0; i + l < n; l++) {
        double d = (double)w[i + l] - (double)q[i + l];
        double square = d * d;
        lanes[l] += column_weight ? (double)column_weight[i + l] * square : square;
    }
}

static void error_blocks(const void *p, int64_t begin, int64_t end) {
    const blocks_task *t = p;
    const grid g = *t->g;
    float quantized[STRIP];
    for (int64_t block = begin; block < end; block++) {
        int64_t top = block / t->grid_columns * t->block_rows, left = block % t->grid_columns * t->block_columns;
        int64_t bottom = min_i64(top + t->block_rows, t->rows), width = min_i64(t->block_columns, t->columns - left);
        for (int64_t c = 0; c < t->candidates; c++) {
            int32_t k = t->exponents[c * t->blocks + block];
            float scale = power_of_two(k);
            double lanes[LANES] = {0};
            for (int64_t row = top; row < bottom; row++)
                for (int64_t strip = 0; strip < width; strip += STRIP) {
                    int64_t n = min_i64(STRIP, width - strip), at = row * t->columns + left + strip;
                    quantize_run(&g, t->weight + at, (uint32_t *)quantized, n, k, (uint64_t)at, scale);
                    const float *w = (const float *)(t->weight + at);
                    for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(w + 8 * t->columns + i); /* rows below */
                    if (t->column_weight) add_errors(lanes, w, quantized, t->column_weight + left + strip, n);
                    else add_errors(lanes, w, quantized, 0, n);
                }
            for (int half = LANES / 2; half > 0; half /= 2)
                for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
            ((double *)t->out)[c * t->blocks + block] = lanes[0];
        }
    }
}

void qq_block_squared_error(const grid *g, const uint32_t *weight, int64_t rows, int64_t columns,
                            const int32_t *exponents, int64_t candidates, int64_t block_rows, int64_t block_columns,
                            const float *column_weight, double *out, int32_t threads) {
    blocks_task t = tiles(rows, columns, block_rows, block_columns);
    t.g = g, t.weight = weight, t.out = out, t.exponents = exponents, t.candidates = candidates;
    t.column_weight = column_weight;
    parallel(error_blocks, &t, t.blocks, threads);
}
