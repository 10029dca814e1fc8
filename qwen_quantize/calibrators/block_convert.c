/* Quantizes weights to E4M3 in blocks with power-of-two scales, without calibration data: straight from bfloat16,
 * float16 or float32 (qb_quantize), or from E4M3 codes with any float32 scales (qb_requantize).
 *
 * Nearest even, saturating, subnormals kept. Each block tries the largest exponent that its largest magnitude needs
 * (rceil) and its neighbour (the OCP floor exponent, or the one above it) and takes the one with less squared error,
 * rceil when equal. Codes, exponents and choices are those of scale_search.py: errors are exact in double and are
 * added in eight lanes by column, rows first, as in the kernels of the number formats.
 *
 * Everything happens in units of the block's scale, which is exact: multiplying by a power of two changes no bits of
 * a double, nor of a float32 that grows. Build without contraction and without fast-math.
 */
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512VBMI__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 8, STRIP = 512, MAGNITUDES = 128, ROWS_AHEAD = 4 };
enum { KIND_BF16, KIND_FP16, KIND_FP32 };
enum { MAX_RANK = 0x7e, NAN_MAGNITUDE = 0x7f, EMAX = 8, MAX_FRACTION = 0x600000 }; /* 448 = 1.75 * 2^8 */

INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
INLINE uint64_t bits_of_double(double x) { uint64_t u; memcpy(&u, &x, 8); return u; }
INLINE double double_of(uint64_t u) { double x; memcpy(&x, &u, 8); return x; }
INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int32_t clamp_exponent(int32_t e) { return e < -127 ? -127 : e > 127 ? 127 : e; }
INLINE double power_of_two(int32_t k) { return double_of((uint64_t)(k + 1023) << 52); } /* -1022 .. 1023 */

/* ---- a magnitude in units of the scale to its rank (the code without sign) ----
 *
 * Adding 2^(e + 20) to a float of exponent e rounds it to three fraction bits, to nearest even; the sum's low bits
 * are the significand as an integer. Below 2^-6, where E4M3 is subnormal, e stays -6. */

INLINE float rounder(float y) {
    uint32_t field = bits_of(y) & 0x7f800000U;
    field = field > (uint32_t)(127 - 6) << 23 ? field : (uint32_t)(127 - 6) << 23;
    return float_of(field + (20U << 23));
}

INLINE uint32_t rank_of(float y, float magic) {
    uint32_t sum = bits_of(y + magic), base = bits_of(magic);
    return sum - base + ((base >> 20) - ((127 - 6 + 20) << 3));
}

INLINE double rounder_double(double y) { /* the same with 2^(e + 49) */
    uint64_t field = bits_of_double(y) & 0x7ff0000000000000ULL;
    uint64_t least = (uint64_t)(1023 - 6) << 52;
    return double_of((field > least ? field : least) + (49ULL << 52));
}

INLINE uint32_t rank_of_double(double y, double magic) {
    uint64_t sum = bits_of_double(y + magic), base = bits_of_double(magic);
    return (uint32_t)(sum - base + ((base >> 49) - ((1023 - 6 + 49) << 3)));
}

/* ---- the two candidates ---- */

typedef struct { int32_t rceil, other; } candidates;

INLINE candidates candidates_of(uint32_t amax) { /* the bits of a positive float32 */
    if (amax == 0) return (candidates){0, 0};
    int32_t bias = 127;
    if (amax < 0x800000U) { amax = bits_of((float)(int32_t)amax); bias = 127 + 149; }
    int32_t floor = (int32_t)(amax >> 23) - bias - EMAX;
    int32_t rceil = clamp_exponent(floor + ((amax & 0x7fffffU) > MAX_FRACTION ? 1 : 0));
    floor = clamp_exponent(floor);
    return (candidates){rceil, clamp_exponent(rceil == floor ? floor + 1 : floor)};
}

/* What is said of each block; arrays over the grid. Errors and signal are sums of squares. */
typedef struct {
    int32_t *exponents, *baseline_exponents;
    double *errors, *baseline_errors, *signal;
    uint8_t *zero;
} report;

INLINE int32_t choose(const report *r, int64_t block, candidates c, double rceil_error, double other_error,
                      double signal, int zero) {
    int other = other_error < rceil_error;
    r->exponents[block] = other ? c.other : c.rceil;
    r->baseline_exponents[block] = c.rceil;
    r->errors[block] = other ? other_error : rceil_error;
    r->baseline_errors[block] = rceil_error;
    r->signal[block] = signal;
    r->zero[block] = (uint8_t)zero;
    return other;
}

INLINE double sum_lanes(double *lanes) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

typedef struct {
    const void *source; /* codes or floats, [rows, columns] */
    const float *scale, *values; /* requantize only: one for each block; the values of the codes 0 .. 127 */
    uint8_t *codes;
    int64_t rows, columns, block_rows, block_columns, across, blocks;
    int32_t kind;
    report report;
    int64_t bad; /* the first place, counted by rows, with a value that is not finite; rows * columns: none */
} task;

INLINE void found_bad(task *t, int64_t place) {
    int64_t known = __atomic_load_n(&t->bad, __ATOMIC_RELAXED);
    while (place < known && !__atomic_compare_exchange_n(&t->bad, &known, place, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

typedef struct { int64_t top, left, height, width, block; } tile;

INLINE tile tile_of(const task *t, int64_t block) {
    int64_t top = block / t->across * t->block_rows, left = block % t->across * t->block_columns;
    return (tile){top, left, min_i64(t->block_rows, t->rows - top), min_i64(t->block_columns, t->columns - left), block};
}

/* ---- floats ---- */

INLINE uint32_t load_bits(const void *source, int64_t i, const int kind) {
    if (kind == KIND_FP32) return ((const uint32_t *)source)[i];
    uint32_t h = ((const uint16_t *)source)[i];
    if (kind == KIND_BF16) return h << 16;
    uint32_t magnitude = h & 0x7fffU, sign = (h & 0x8000U) << 16;
    uint32_t subnormal = bits_of((float)(int32_t)magnitude * float_of((uint32_t)(127 - 24) << 23));
    uint32_t normal = (magnitude << 13) + ((uint32_t)(127 - 15) << 23);
    normal = magnitude >= 0x7c00U ? 0x7f800000U | (magnitude << 13) : normal;
    return (magnitude < 0x400U ? subnormal : normal) | sign;
}

INLINE void prefetch_row(const void *source, int64_t at, int64_t width, int64_t size) {
    const char *p = (const char *)source + at * size;
    for (int64_t byte = 0; byte < width * size; byte += 64) __builtin_prefetch(p + byte);
}

INLINE void prefetch_out(uint8_t *out, int64_t width) { /* it is written soon */
    for (int64_t byte = 0; byte < width; byte += 64) __builtin_prefetch(out + byte, 1);
}

INLINE uint32_t largest(const task *t, tile b, const int kind) { /* bits of the magnitude; NaN is above infinity */
    uint32_t all = 0;
    int64_t size = kind == KIND_FP32 ? 4 : 2;
    for (int64_t row = 0; row < b.height; row++) {
        int64_t at = (b.top + row) * t->columns + b.left;
        if (row + ROWS_AHEAD < b.height) prefetch_row(t->source, at + ROWS_AHEAD * t->columns, b.width, size);
        if (kind == KIND_FP32) {
            const uint32_t *x = (const uint32_t *)t->source + at;
            for (int64_t i = 0; i < b.width; i++) { uint32_t a = x[i] & 0x7fffffffU; all = a > all ? a : all; }
        } else {
            const uint16_t *x = (const uint16_t *)t->source + at;
            uint16_t most = 0;
            for (int64_t i = 0; i < b.width; i++) { uint16_t a = x[i] & 0x7fffU; most = a > most ? a : most; }
            all = most > all ? most : all;
        }
    }
    if (kind == KIND_FP32) return all;
    uint16_t half = (uint16_t)all;
    return load_bits(&half, 0, kind);
}

/* Exact: a multiple of y's last place, and small. */
INLINE float rounding_error(float y) {
    float clamped = y < 448.0f ? y : 448.0f, magic = rounder(clamped);
    return y - ((clamped + magic) - magic);
}

/* Eight lanes in one variable: compilers split it for narrower machines, but do not join an array of eight. */
typedef double lanes_of_double __attribute__((vector_size(8 * LANES)));
typedef float lanes_of_float __attribute__((vector_size(4 * LANES)));

INLINE void add_squares(lanes_of_double *sum, const float *x) {
    lanes_of_float narrow;
    memcpy(&narrow, x, sizeof narrow);
    lanes_of_double wide = __builtin_convertvector(narrow, lanes_of_double);
    *sum += wide * wide;
}

INLINE void float_errors(const task *t, tile b, candidates c, double *result, const int kind) {
    lanes_of_double first = {0}, second = {0}, squares = {0};
    float up = (float)power_of_two(-c.rceil), up_other = (float)power_of_two(-c.other);
    float values[STRIP], errors[STRIP], other_errors[STRIP];
    for (int64_t row = 0; row < b.height; row++) {
        int64_t at = (b.top + row) * t->columns + b.left;
        for (int64_t strip = 0; strip < b.width; strip += STRIP) {
            int64_t n = min_i64(STRIP, b.width - strip), whole = (n + LANES - 1) / LANES * LANES;
            for (int64_t i = 0; i < n; i++) values[i] = float_of(load_bits(t->source, at + strip + i, kind) & 0x7fffffffU);
            for (int64_t i = n; i < whole; i++) values[i] = 0.0f; /* adds nothing */
            for (int64_t i = 0; i < whole; i++) {
                errors[i] = rounding_error(values[i] * up);
                other_errors[i] = rounding_error(values[i] * up_other);
            }
            for (int64_t i = 0; i < whole; i += LANES) {
                add_squares(&first, errors + i);
                add_squares(&second, other_errors + i);
                add_squares(&squares, values + i);
            }
        }
    }
    double unit = power_of_two(c.rceil), other_unit = power_of_two(c.other);
    result[0] = sum_lanes((double *)&first) * unit * unit;
    result[1] = sum_lanes((double *)&second) * other_unit * other_unit;
    result[2] = sum_lanes((double *)&squares);
}

INLINE void encode_floats(const task *t, tile b, int32_t exponent, const int kind) {
    float up = (float)power_of_two(-exponent);
    for (int64_t row = 0; row < b.height; row++) {
        int64_t at = (b.top + row) * t->columns + b.left;
        uint8_t *out = t->codes + at;
        uint32_t wide[STRIP];
        for (int64_t strip = 0; strip < b.width; strip += STRIP) {
            int64_t n = min_i64(STRIP, b.width - strip);
            for (int64_t i = 0; i < n; i++) {
                uint32_t u = load_bits(t->source, at + strip + i, kind);
                float y = float_of(u & 0x7fffffffU) * up;
                y = y < 448.0f ? y : 448.0f;
                wide[i] = rank_of(y, rounder(y)) | ((u >> 24) & 0x80U);
            }
            for (int64_t i = 0; i < n; i++) out[strip + i] = (uint8_t)wide[i];
        }
    }
}

/* The same in double, for scales above 1: dividing a float32 by them could lose bits. */
static void double_errors(const task *t, tile b, candidates c, double *result) {
    const int32_t exponents[2] = {c.rceil, c.other};
    double squares[LANES] = {0};
    for (int candidate = 0; candidate < 2; candidate++) {
        double lanes[LANES] = {0}, up = power_of_two(-exponents[candidate]), unit = power_of_two(exponents[candidate]);
        for (int64_t row = 0; row < b.height; row++) {
            int64_t at = (b.top + row) * t->columns + b.left;
            for (int64_t i = 0; i < b.width; i++) {
                double x = (double)float_of(load_bits(t->source, at + i, t->kind) & 0x7fffffffU), y = x * up;
                double clamped = y < 448.0 ? y : 448.0, magic = rounder_double(clamped);
                double d = y - ((clamped + magic) - magic);
                lanes[i % LANES] += d * d;
                if (candidate == 0) squares[i % LANES] += x * x;
            }
        }
        result[candidate] = sum_lanes(lanes) * unit * unit;
    }
    result[2] = sum_lanes(squares);
}

static void double_encode(const task *t, tile b, int32_t exponent) {
    double up = power_of_two(-exponent);
    for (int64_t row = 0; row < b.height; row++) {
        int64_t at = (b.top + row) * t->columns + b.left;
        for (int64_t i = at; i < at + b.width; i++) {
            uint32_t u = load_bits(t->source, i, t->kind);
            double y = (double)float_of(u & 0x7fffffffU) * up;
            y = y < 448.0 ? y : 448.0;
            t->codes[i] = (uint8_t)(rank_of_double(y, rounder_double(y)) | ((u >> 24) & 0x80U));
        }
    }
}

static void report_bad_floats(task *t, tile b) {
    for (int64_t row = 0; row < b.height; row++)
        for (int64_t i = 0; i < b.width; i++) {
            int64_t at = (b.top + row) * t->columns + b.left + i;
            if ((load_bits(t->source, at, t->kind) & 0x7fffffffU) >= 0x7f800000U) { found_bad(t, at); return; }
        }
}

INLINE void quantize_block(task *t, int64_t block, const int kind) {
    tile b = tile_of(t, block);
    uint32_t amax = largest(t, b, kind);
    if (amax >= 0x7f800000U) { report_bad_floats(t, b); return; }
    candidates c = candidates_of(amax);
    double sums[3];
    if (c.rceil > 0 || c.other > 0) {
        double_errors(t, b, c, sums);
        double_encode(t, b, choose(&t->report, block, c, sums[0], sums[1], sums[2], 0) ? c.other : c.rceil);
        return;
    }
    float_errors(t, b, c, sums, kind);
    int other = choose(&t->report, block, c, sums[0], sums[1], sums[2], amax == 0);
    encode_floats(t, b, other ? c.other : c.rceil, kind);
}

static void quantize_work(task *t, int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++)
        switch (t->kind) {
            case KIND_BF16: quantize_block(t, block, KIND_BF16); break;
            case KIND_FP16: quantize_block(t, block, KIND_FP16); break;
            default: quantize_block(t, block, KIND_FP32);
        }
}

/* ---- codes ---- */

INLINE void count_codes(const task *t, tile b, uint32_t *counts) {
    uint32_t lanes[4][256]; /* four, or equal neighbours wait for each other */
    memset(lanes, 0, sizeof lanes);
    for (int64_t row = 0; row < b.height; row++) {
        const uint8_t *x = (const uint8_t *)t->source + (b.top + row) * t->columns + b.left;
        if (row + ROWS_AHEAD < b.height) prefetch_row(x, ROWS_AHEAD * t->columns, b.width, 1);
        prefetch_out(t->codes + (x - (const uint8_t *)t->source), b.width);
        int64_t i = 0;
        for (; i + 8 <= b.width; i += 8) {
            uint64_t eight;
            memcpy(&eight, x + i, 8);
            for (int l = 0; l < 8; l++) lanes[l & 3][(eight >> (8 * l)) & 255]++;
        }
        for (; i < b.width; i++) lanes[0][x[i]]++;
    }
    for (int code = 0; code < 256; code++)
        counts[code] = lanes[0][code] + lanes[1][code] + lanes[2][code] + lanes[3][code];
}

typedef struct { double square[2][MAGNITUDES]; uint8_t code[2][MAGNITUDES]; } code_map;

INLINE void map_codes(const float *magnitudes, candidates c, code_map *map) {
    const int32_t exponents[2] = {c.rceil, c.other};
    for (int candidate = 0; candidate < 2; candidate++) {
        double up = power_of_two(-exponents[candidate]), unit = power_of_two(exponents[candidate]);
        uint64_t wide[MAGNITUDES];
        for (int m = 0; m < MAGNITUDES; m++) {
            double y = (double)magnitudes[m] * up, clamped = y < 448.0 ? y : 448.0, magic = rounder_double(clamped);
            double d = (y - ((clamped + magic) - magic)) * unit;
            map->square[candidate][m] = d * d;
            wide[m] = rank_of_double(clamped, magic);
        }
        for (int m = 0; m < MAGNITUDES; m++) map->code[candidate][m] = (uint8_t)wide[m];
    }
}

/* The error in the order of the kernels of the number formats. */
static double error_in_order(const task *t, tile b, const double *square) {
    lanes_of_double lanes = {0};
    for (int64_t row = 0; row < b.height; row++) {
        const uint8_t *x = (const uint8_t *)t->source + (b.top + row) * t->columns + b.left;
        int64_t i = 0;
        for (; i + LANES <= b.width; i += LANES) {
            double terms[LANES];
            for (int l = 0; l < LANES; l++) terms[l] = square[x[i + l] & 0x7f];
            lanes_of_double added;
            memcpy(&added, terms, sizeof added);
            lanes += added;
        }
        for (int l = 0; i + l < b.width; l++) lanes[l] += square[x[i + l] & 0x7f];
    }
    return sum_lanes((double *)&lanes);
}

/* The two errors, and the sum of squares of the weight. Equal terms, which are common, make a tie in any order; where
 * the terms differ and the sums hardly do, only the order of the other kernels gives their choice. */
INLINE void code_errors(const task *t, tile b, const uint32_t *counts, const float *magnitudes, const code_map *map,
                        double *result) {
    lanes_of_double first = {0}, second = {0}, squares = {0};
    int differ = 0;
    for (int m = 0; m < MAGNITUDES; m++) differ |= map->square[0][m] != map->square[1][m];
    for (int m = 0; m < MAGNITUDES; m += LANES)
        for (int l = 0; l < LANES; l++) {
            double count = (double)(int32_t)counts[m + l], x = (double)magnitudes[m + l];
            first[l] += count * map->square[0][m + l];
            second[l] += count * map->square[1][m + l];
            squares[l] += count * (x * x);
        }
    result[0] = sum_lanes((double *)&first);
    result[1] = sum_lanes((double *)&second);
    result[2] = sum_lanes((double *)&squares);
    double gap = result[0] - result[1], most = (double)(b.height * (b.width / LANES + 1) + 2 * MAGNITUDES) * 0x1p-51;
    if (!differ) result[1] = result[0];
    else if ((gap < 0 ? -gap : gap) <= most * result[0]) {
        result[0] = error_in_order(t, b, map->square[0]);
        result[1] = error_in_order(t, b, map->square[1]);
    }
}

INLINE void translate_row(const uint8_t *x, uint8_t *out, int64_t n, const uint8_t *table) { /* [256] */
    int64_t i = 0;
#if defined(__AVX512VBMI__)
    __m512i a = _mm512_loadu_si512(table), b = _mm512_loadu_si512(table + 64);
    __m512i c = _mm512_loadu_si512(table + 128), d = _mm512_loadu_si512(table + 192);
    for (; i + 64 <= n; i += 64) {
        __m512i index = _mm512_loadu_si512(x + i);
        __m512i low = _mm512_permutex2var_epi8(a, index, b), high = _mm512_permutex2var_epi8(c, index, d);
        _mm512_storeu_si512(out + i, _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high));
    }
#endif
    for (; i < n; i++) out[i] = table[x[i]];
}

static void report_bad_codes(task *t, tile b, const float *magnitudes) {
    for (int64_t row = 0; row < b.height; row++)
        for (int64_t i = 0; i < b.width; i++) {
            int64_t at = (b.top + row) * t->columns + b.left + i;
            uint32_t value = bits_of(magnitudes[((const uint8_t *)t->source)[at] & 0x7f]);
            if (value >= 0x7f800000U) { found_bad(t, at); return; }
        }
}

static void requantize_block(task *t, int64_t block) {
    tile b = tile_of(t, block);
    uint32_t counts[256];
    count_codes(t, b, counts);
    for (int m = 0; m < MAGNITUDES; m++) counts[m] += counts[m + MAGNITUDES];
    float scale = t->scale[block], magnitudes[MAGNITUDES];
    uint32_t amax = 0;
    for (int m = 0; m < MAGNITUDES; m++) { /* codes that do not occur count as zero */
        uint32_t value = counts[m] ? bits_of(t->values[m] * scale) & 0x7fffffffU : 0;
        magnitudes[m] = float_of(value);
        amax = value > amax ? value : amax;
    }
    if (amax >= 0x7f800000U) { report_bad_codes(t, b, magnitudes); return; }
    candidates c = candidates_of(amax);
    code_map map;
    double sums[3];
    map_codes(magnitudes, c, &map);
    code_errors(t, b, counts, magnitudes, &map, sums);
    int other = choose(&t->report, block, c, sums[0], sums[1], sums[2], amax == 0);
    uint8_t table[256], flip = (bits_of(scale) >> 24) & 0x80U; /* a negative scale */
    for (int m = 0; m < MAGNITUDES; m++) {
        table[m] = map.code[other][m] | flip;
        table[m + MAGNITUDES] = map.code[other][m] | (flip ^ 0x80U);
    }
    for (int64_t row = 0; row < b.height; row++) {
        int64_t at = (b.top + row) * t->columns + b.left;
        translate_row((const uint8_t *)t->source + at, t->codes + at, b.width, table);
    }
}

static void requantize_work(task *t, int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++) requantize_block(t, block);
}

/* ---- threads ---- */

typedef struct { void (*work)(task *, int64_t, int64_t); task *task; int64_t runs, next; } pool;

enum { MAX_THREADS = 256, RUNS_PER_THREAD = 8 };

static void *take_runs(void *argument) {
    pool *p = argument;
    for (;;) {
        int64_t run = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED), n = p->task->blocks;
        if (run >= p->runs) return 0;
        p->work(p->task, n * run / p->runs, n * (run + 1) / p->runs);
    }
}

static int64_t over_blocks(void (*work)(task *, int64_t, int64_t), task *t, int32_t threads) {
    t->across = (t->columns + t->block_columns - 1) / t->block_columns;
    t->blocks = t->across * ((t->rows + t->block_rows - 1) / t->block_rows);
    t->bad = t->rows * t->columns;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads > t->blocks) threads = (int32_t)t->blocks;
    int64_t runs = threads <= 1 ? 1 : min_i64((int64_t)threads * RUNS_PER_THREAD, t->blocks);
    pool p = {work, t, t->blocks ? runs : 0, 0};
    pthread_t ids[MAX_THREADS];
    int32_t started = 0;
    while (started < threads - 1 && pthread_create(&ids[started], 0, take_runs, &p) == 0) started++;
    take_runs(&p);
    for (int32_t i = 0; i < started; i++) pthread_join(ids[i], 0);
    return t->bad;
}

/* Both return the first place, counted by rows, that is not finite, rows * columns when all are; then nothing else
 * that they write means anything. */

int64_t qb_quantize(const void *weight, int32_t kind, uint8_t *codes, int64_t rows, int64_t columns, int64_t block_rows,
                    int64_t block_columns, const report *r, int32_t threads) {
    task t = {.source = weight, .kind = kind, .codes = codes, .rows = rows, .columns = columns,
              .block_rows = block_rows, .block_columns = block_columns, .report = *r};
    return over_blocks(quantize_work, &t, threads);
}

int64_t qb_requantize(const uint8_t *source, const float *scale, const float *values, uint8_t *codes, int64_t rows,
                      int64_t columns, int64_t block_rows, int64_t block_columns, const report *r, int32_t threads) {
    task t = {.source = source, .scale = scale, .values = values, .codes = codes, .rows = rows, .columns = columns,
              .block_rows = block_rows, .block_columns = block_columns, .report = *r};
    return over_blocks(requantize_work, &t, threads);
}

/* The first of n floats that is not finite, n when all are. */
int64_t qb_find_bad(const void *floats, int32_t kind, int64_t n) {
    for (int64_t begin = 0; begin < n; begin += 1 << 16) {
        int64_t end = min_i64(begin + (1 << 16), n);
        task t = {.source = floats, .kind = kind, .columns = n};
        tile b = {0, begin, 1, end - begin, 0};
        uint32_t most = kind == KIND_BF16   ? largest(&t, b, KIND_BF16)
                        : kind == KIND_FP16 ? largest(&t, b, KIND_FP16)
                                            : largest(&t, b, KIND_FP32);
        if (most < 0x7f800000U) continue;
        for (int64_t i = begin; i < end; i++)
            if ((load_bits(floats, i, kind) & 0x7fffffffU) >= 0x7f800000U) return i;
    }
    return n;
}
