/* Matrix products as matrix units compute them: the same bits as dot_twin.py, 32 output columns at a time.
 *
 * The right operand is packed in strips of W columns, [strip][k][W], beside the exponents of its elements, so that
 * every inner loop runs over W neighbours and a compiler vectorises it. What a loop needs between its passes stands in
 * small arrays of W. The unit's parameters are those of dot.py's DotUnit; `struct unit` is the image that dot_calls.py
 * fills. Inputs are finite; an output whose sum overflows on the way is marked in `undecided` and left to the twin.
 *
 * Build with -ffp-contract=off: a fused multiply-add may stand only where fmaf is written.
 */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { W = 32, ROWS = 8, MOST_PRODUCTS = 64 };
enum { ALIGNED, FMA, PAIRWISE };                    /* order */
enum { WITH_PRODUCTS, TWO_STAGE, SEPARATE };        /* joining */
enum { RNE, RNA, RTZ, FLOOR, CEIL };                /* roundings */
enum { NARROW, WIDE, EXPANSION };                   /* path: products as float and int32, as double, summed exactly */
enum { NOTHING = -8192, LOWEST = -600 };            /* exponent of zero; where exponents of sums are cut */

typedef struct unit {
    int32_t order, joining, path, products, fraction_bits; /* fraction_bits < 0: no alignment */
    int32_t alignment_rounding, normalised, lanes, mantissa_bits, min_exponent, final_rounding;
    int32_t saturate, flush_outputs, promotion_interval;   /* 0: none */
    int32_t min_alignment_exponent, sum_fraction_bits, c_fraction_bits, join_rounding, c_dropped_below;
    int32_t max_product_exponent;
    double max_value;
} unit;

INLINE double double_of(int64_t u) { double x; memcpy(&x, &u, 8); return x; }
INLINE int64_t bits_of(double x) { int64_t u; memcpy(&u, &x, 8); return u; }
INLINE double power(int32_t e) { return double_of((int64_t)(e + 1023) << 52); } /* -1022 .. 1023 */
INLINE int32_t max_i32(int32_t a, int32_t b) { return a > b ? a : b; }
INLINE int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }
INLINE int32_t exponent_of(double x) { return (int32_t)((bits_of(x) >> 52) & 0x7ff) - 1023; }

/* To the nearest with ties away from zero; exact, unlike adding one half. */
INLINE double nearest_away(double x) {
    double t = trunc(x);
    return copysign(fabs(t) + (fabs(x - t) >= 0.5 ? 1.0 : 0.0), x);
}
INLINE float nearest_away_f(float x) {
    float t = truncf(x);
    return copysignf(fabsf(t) + (fabsf(x - t) >= 0.5f ? 1.0f : 0.0f), x);
}

INLINE void round_lanes(double *x, int32_t rounding) {
    switch (rounding) {
        case RNE: for (int w = 0; w < W; w++) x[w] = rint(x[w]); break;
        case RNA: for (int w = 0; w < W; w++) x[w] = nearest_away(x[w]); break;
        case RTZ: for (int w = 0; w < W; w++) x[w] = trunc(x[w]); break;
        case FLOOR: for (int w = 0; w < W; w++) x[w] = floor(x[w]); break;
        default: for (int w = 0; w < W; w++) x[w] = ceil(x[w]);
    }
}

/* ---- the products of one block: largest exponent, aligned sum ---- */

/* Of `step` lanes only every step-th product counts, from the first on. */
INLINE void largest_exponents(const int16_t *ea, const int16_t *eb, int32_t n, int32_t step, int32_t *out) {
    int16_t e[W];
    for (int w = 0; w < W; w++) e[w] = 2 * NOTHING;
    for (int32_t l = 0; l < n; l += step) {
        int16_t x = ea[l];
        for (int w = 0; w < W; w++) {
            int16_t s = (int16_t)(eb[l * W + w] + x);
            e[w] = s > e[w] ? s : e[w];
        }
    }
    for (int w = 0; w < W; w++) out[w] = max_i32(e[w], LOWEST);
}

/* The same for products that are normalised first: the exponent of the product itself. */
static void largest_product_exponents(const float *a, const float *b, int32_t n, int32_t step, int32_t *out) {
    double m[W];
    for (int w = 0; w < W; w++) m[w] = 0;
    for (int32_t l = 0; l < n; l += step) {
        double x = fabs((double)a[l]);
        for (int w = 0; w < W; w++) {
            double p = x * fabs((double)b[l * W + w]);
            m[w] = p > m[w] ? p : m[w];
        }
    }
    for (int w = 0; w < W; w++) out[w] = m[w] > 0 ? exponent_of(m[w]) : LOWEST;
}

INLINE void sum_narrow(const float *a, const float *b, int32_t n, int32_t step, const float *scale, int32_t *sum,
                       const int rounding) {
    int32_t s[W];
    for (int w = 0; w < W; w++) s[w] = 0;
    for (int32_t l = 0; l < n; l += step) {
        float x = a[l];
        for (int w = 0; w < W; w++) {
            float t = b[l * W + w] * x * scale[w];
            t = rounding == FLOOR ? floorf(t) : rounding == CEIL ? ceilf(t) : rounding == RNE ? rintf(t) :
                rounding == RNA ? nearest_away_f(t) : t;
            s[w] += (int32_t)t;
        }
    }
    memcpy(sum, s, sizeof s);
}

/* 2^(F - e), within the bounds that aligned_narrow needs. */
INLINE float scale_of(const unit *u, int32_t e) {
    uint32_t bits = (uint32_t)(min_i32(max_i32(u->fraction_bits - e, -u->max_product_exponent - 5), 118) + 127) << 23;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* sum[w] = sum of round(a b 2^(F - e[w])). Products are exact in float here, and scaling is too: the scale is kept so
 * large that no product becomes subnormal, where it rounds like any other far below one half. */
static void aligned_narrow(const unit *u, const float *a, const float *b, int32_t n, int32_t step, const int32_t *e,
                           double *sum) {
    float scale[W];
    int32_t chunk = 1 << (29 - u->fraction_bits), part[W];
    for (int w = 0; w < W; w++) { scale[w] = scale_of(u, e[w]); sum[w] = 0; }
    chunk *= step; /* |a b| scaled is below 2^(F+2): `chunk` of them fit an int32 */
    for (int32_t l = 0; l < n; l += chunk) {
        int32_t count = min_i32(n - l, chunk);
        switch (u->alignment_rounding) {
            case RNE: sum_narrow(a + l, b + l * W, count, step, scale, part, RNE); break;
            case RNA: sum_narrow(a + l, b + l * W, count, step, scale, part, RNA); break;
            case RTZ: sum_narrow(a + l, b + l * W, count, step, scale, part, RTZ); break;
            case FLOOR: sum_narrow(a + l, b + l * W, count, step, scale, part, FLOOR); break;
            default: sum_narrow(a + l, b + l * W, count, step, scale, part, CEIL);
        }
        for (int w = 0; w < W; w++) sum[w] += part[w];
    }
}

static void aligned_wide(const unit *u, const float *a, const float *b, int32_t n, int32_t step, const int32_t *e,
                         double *sum) {
    double scale[W], term[W];
    for (int w = 0; w < W; w++) { scale[w] = power(u->fraction_bits - e[w]); sum[w] = 0; }
    for (int32_t l = 0; l < n; l += step) {
        double x = a[l];
        for (int w = 0; w < W; w++) term[w] = x * b[l * W + w] * scale[w];
        round_lanes(term, u->alignment_rounding);
        for (int w = 0; w < W; w++) sum[w] += term[w];
    }
}

/* ---- exact sums of doubles ---- */

INLINE double two_sum(double a, double b, double *error) {
    double s = a + b, bb = s - a;
    *error = (a - (s - bb)) + (b - bb);
    return s;
}

/* x + rest, rounded to odd: an inexact result gets an odd last bit, so that rounding it again to fewer bits is rounding
 * the exact sum. `rest` is smaller than the last place of x. */
INLINE double to_odd(double x, double rest) {
    int64_t u = bits_of(x), away = (rest < 0) == (u < 0) ? 1 : -1;
    return double_of(u + (rest != 0 && (u & 1) == 0 ? away : 0));
}

/* out[w] = terms[0][w] + ... exactly, rounded to odd (Shewchuk 1997, GROW-EXPANSION). +0 for an exact zero. */
static void sum_exactly(double (*terms)[W], int32_t n, double *out) {
    double s[W], lost[W];
    for (int w = 0; w < W; w++) { s[w] = 0; lost[w] = 0; }
    for (int32_t i = 0; i < n; i++)
        for (int w = 0; w < W; w++) { double e; s[w] = two_sum(s[w], terms[i][w], &e); lost[w] += fabs(e); }
    double any = 0;
    for (int w = 0; w < W; w++) { out[w] = s[w]; any += lost[w]; }
    if (any == 0) return;
    for (int32_t i = 1; i < n; i++) /* terms[0 .. i] become an expansion: not overlapping, smallest first */
        for (int32_t j = 0; j < i; j++)
            for (int w = 0; w < W; w++) {
                double e, q = two_sum(terms[i][w], terms[j][w], &e);
                terms[j][w] = e;
                terms[i][w] = q;
            }
    for (int w = 0; w < W; w++) { s[w] = terms[n - 1][w]; lost[w] = 0; }
    for (int32_t i = n - 2; i >= 0; i--)
        for (int w = 0; w < W; w++) { /* once something is lost, the rest cannot change its sign */
            double e, t = two_sum(s[w], terms[i][w], &e);
            s[w] = lost[w] != 0 ? s[w] : t;
            lost[w] = lost[w] != 0 ? lost[w] : e;
        }
    for (int w = 0; w < W; w++) out[w] = to_odd(s[w], lost[w]) + 0.0;
}

/* ---- one step of the unit ---- */

static void leave_overflow(const unit *u, double *v, uint8_t *bad) {
    for (int w = 0; w < W; w++) {
        int beyond = fabs(v[w]) > u->max_value;
        if (!u->saturate) bad[w] |= (uint8_t)beyond;
        v[w] = beyond ? (u->saturate ? copysign(u->max_value, v[w]) : 0.0) : v[w];
    }
}

/* Rounds v to the register; bad[w] is set where it overflows to an infinity. */
INLINE void round_to_register(const unit *u, double *v, uint8_t *bad) {
    double q[W];
    for (int w = 0; w < W; w++) {
        int64_t e = ((bits_of(v[w]) >> 52) & 0x7ff) - 1023;
        e = (e > u->min_exponent ? e : u->min_exponent) - u->mantissa_bits;
        q[w] = double_of((e + 1023) << 52);
        v[w] *= double_of((1023 - e) << 52);
    }
    round_lanes(v, u->final_rounding);
    double most = u->max_value, least = u->flush_outputs ? power(u->min_exponent) : 0;
    int over = 0;
    for (int w = 0; w < W; w++) {
        double x = v[w] * q[w];
        over |= !(fabs(x) <= most);
        v[w] = fabs(x) < least ? copysign(0.0, x) : x;
    }
    if (over) leave_overflow(u, v, bad);
}

INLINE void exponents_of_sums(const unit *u, const double *c, int32_t *e) {
    for (int w = 0; w < W; w++) e[w] = c[w] == 0 ? LOWEST : max_i32(exponent_of(c[w]), u->min_exponent);
}

static void exact_terms(const unit *u, const float *a, const float *b, int32_t n, const double *c, const int32_t *e,
                        double *v) {
    double terms[MOST_PRODUCTS + 1][W];
    int32_t count = n;
    for (int32_t l = 0; l < n; l++)
        for (int w = 0; w < W; w++) terms[l][w] = (double)a[l] * b[l * W + w];
    if (c) memcpy(terms[count++], c, sizeof terms[0]);
    if (u->fraction_bits >= 0)
        for (int32_t l = 0; l < count; l++) {
            for (int w = 0; w < W; w++) terms[l][w] *= power(u->fraction_bits - e[w]);
            round_lanes(terms[l], u->alignment_rounding);
        }
    sum_exactly(terms, count, v);
}

/* v[w] = sum of the n products, and of c where it is not null, aligned at e[w] + F; in units of 2^(e[w] - F). */
INLINE void aligned_sum(const unit *u, const float *a, const float *b, int32_t n, int32_t step, const double *c,
                        const int32_t *e, double *v) {
    if (u->path == EXPANSION) { exact_terms(u, a, b, n, c, e, v); return; }
    if (u->path == NARROW) aligned_narrow(u, a, b, n, step, e, v);
    else aligned_wide(u, a, b, n, step, e, v);
    if (!c) return;
    double term[W];
    for (int w = 0; w < W; w++) term[w] = c[w] * power(u->fraction_bits - e[w]);
    round_lanes(term, u->alignment_rounding);
    for (int w = 0; w < W; w++) v[w] += term[w];
}

INLINE void block_exponents(const unit *u, const float *a, const int16_t *ea, const float *b, const int16_t *eb,
                            int32_t n, int32_t step, int32_t *e) {
    if (u->normalised) largest_product_exponents(a, b, n, step, e);
    else largest_exponents(ea, eb, n, step, e);
}

/* CDNA3: the products' sum v, at exponent e, and c are aligned with each other at two different depths. */
static void join_two_stage(const unit *u, double *v, int32_t *e, const double *c) {
    int32_t ec[W], common[W];
    double term[W];
    exponents_of_sums(u, c, ec);
    for (int w = 0; w < W; w++) {
        common[w] = max_i32(max_i32(e[w], ec[w]), u->min_alignment_exponent);
        v[w] *= power(e[w] - u->fraction_bits + u->sum_fraction_bits - common[w]);
        term[w] = ec[w] < common[w] - u->c_dropped_below ? 0.0 : c[w] * power(u->c_fraction_bits - common[w]);
    }
    round_lanes(v, u->join_rounding);
    round_lanes(term, u->join_rounding);
    for (int w = 0; w < W; w++)
        v[w] = v[w] * power(common[w] - u->sum_fraction_bits) + term[w] * power(common[w] - u->c_fraction_bits) + 0.0;
}

/* The commonest step of all in one pass: c among the products, everything cut toward zero but the last rounding. The
 * sums of products are exact in a float or an int32, see aligned_narrow. */
INLINE void step_truncating(const unit *u, const float *a, const int16_t *ea, const float *b, const int16_t *eb,
                            int32_t n, double *c, uint8_t *bad, const int final_rounding) {
    int32_t e[W], sum[W], chunk = 1 << (29 - u->fraction_bits);
    float scale[W];
    double v[W], most = u->max_value, least = u->flush_outputs ? power(u->min_exponent) : 0;
    int64_t lowest = u->min_exponent, mantissa_bits = u->mantissa_bits, fraction_bits = u->fraction_bits;
    int over = 0;
    largest_exponents(ea, eb, n, 1, e);
    for (int w = 0; w < W; w++) {
        int32_t of_c = max_i32(exponent_of(c[w]), u->min_exponent);
        e[w] = max_i32(max_i32(e[w], c[w] == 0 ? LOWEST : of_c), u->min_alignment_exponent);
        scale[w] = scale_of(u, e[w]);
        v[w] = 0;
    }
    if (n <= chunk) sum_narrow(a, b, n, 1, scale, sum, RTZ);
    else {
        memset(sum, 0, sizeof sum);
        aligned_narrow(u, a, b, n, 1, e, v);
    }
    for (int w = 0; w < W; w++) {
        int64_t top = e[w];
        double x = v[w] + sum[w] + trunc(c[w] * double_of((fraction_bits - top + 1023) << 52));
        x *= double_of((top - fraction_bits + 1023) << 52);
        int64_t q = ((bits_of(x) >> 52) & 0x7ff) - 1023;
        q = (q > lowest ? q : lowest) - mantissa_bits;
        x *= double_of((1023 - q) << 52);
        x = (final_rounding == RTZ ? trunc(x) : rint(x)) * double_of((q + 1023) << 52);
        over |= !(fabs(x) <= most);
        v[w] = fabs(x) < least ? copysign(0.0, x) : x;
    }
    memcpy(c, v, sizeof v);
    if (over) leave_overflow(u, c, bad);
}

/* c[w] <- c[w] + n products. */
static void step_general(const unit *u, const float *a, const int16_t *ea, const float *b, const int16_t *eb, int32_t n,
                         double *c, uint8_t *bad) {
    int32_t e[W], other[W];
    double v[W], second[W];
    if (u->fraction_bits >= 0) block_exponents(u, a, ea, b, eb, n, u->lanes, e);
    if (u->joining == WITH_PRODUCTS) {
        if (u->fraction_bits >= 0) {
            exponents_of_sums(u, c, other);
            for (int w = 0; w < W; w++) e[w] = max_i32(max_i32(e[w], other[w]), u->min_alignment_exponent);
        }
        aligned_sum(u, a, b, n, 1, c, e, v);
    } else {
        aligned_sum(u, a, b, n, u->lanes, 0, e, v);
        if (u->lanes == 2) {
            block_exponents(u, a + 1, ea + 1, b + W, eb + W, n - 1, 2, other);
            aligned_sum(u, a + 1, b + W, n - 1, 2, 0, other, second);
            for (int w = 0; w < W; w++) {
                int32_t common = max_i32(e[w], other[w]);
                v[w] *= power(e[w] - common);
                second[w] *= power(other[w] - common);
                e[w] = common;
            }
            round_lanes(v, u->join_rounding);
            round_lanes(second, u->join_rounding);
            for (int w = 0; w < W; w++) v[w] += second[w];
        }
    }
    if (u->joining == TWO_STAGE) join_two_stage(u, v, e, c);
    else if (u->fraction_bits >= 0)
        for (int w = 0; w < W; w++) v[w] *= power(e[w] - u->fraction_bits);
    round_to_register(u, v, bad);
    if (u->joining == SEPARATE) {
        for (int w = 0; w < W; w++) {
            double rest, s = two_sum(v[w], c[w], &rest);
            v[w] = to_odd(s, rest) + 0.0;
        }
        round_to_register(u, v, bad);
    }
    memcpy(c, v, sizeof v);
}

INLINE void step_aligned(const unit *u, const float *a, const int16_t *ea, const float *b, const int16_t *eb, int32_t n,
                         double *c, uint8_t *bad) {
    int plain = u->path == NARROW && u->joining == WITH_PRODUCTS && !u->normalised && u->alignment_rounding == RTZ;
    if (plain && u->final_rounding == RTZ) step_truncating(u, a, ea, b, eb, n, c, bad, RTZ);
    else if (plain && u->final_rounding == RNE) step_truncating(u, a, ea, b, eb, n, c, bad, RNE);
    else step_general(u, a, ea, b, eb, n, c, bad);
}

/* ---- plain float32 orders ---- */

INLINE float flushed(const unit *u, float x) {
    return u->flush_outputs && fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x;
}

static void step_fma(const unit *u, const float *a, const float *b, int32_t n, float *c) {
    float s[W];
    memcpy(s, c, sizeof s);
    for (int32_t l = 0; l < n; l++) {
        float x = a[l];
        for (int w = 0; w < W; w++) s[w] = fmaf(x, b[l * W + w], s[w]);
        if (u->flush_outputs) for (int w = 0; w < W; w++) s[w] = flushed(u, s[w]);
    }
    memcpy(c, s, sizeof s);
}

/* The products first .. first + n - 1 as a tree of float additions that splits in halves, the smaller one first;
 * products from `present` on are +0. */
static void tree(const unit *u, const float *a, const float *b, int32_t first, int32_t n, int32_t present, float *out) {
    if (n == 1) {
        for (int w = 0; w < W; w++)
            out[w] = first < present ? flushed(u, a[first] * b[(int64_t)first * W + w]) : 0.0f;
        return;
    }
    float right[W];
    tree(u, a, b, first, n / 2, present, out);
    tree(u, a, b, first + n / 2, n - n / 2, present, right);
    for (int w = 0; w < W; w++) out[w] = flushed(u, out[w] + right[w]);
}

/* ---- threads: the items 0 .. n-1 in runs, each taken by whoever is free; the caller works too ---- */

typedef struct {
    const unit *u;
    const float *a, *b, *c;
    const int16_t *ea, *eb;
    float *out;
    uint8_t *undecided;
    int64_t rows, columns, k, row_groups, items, next;
} task;

/* Up to ROWS rows against one strip: the block of the strip stays in the nearest cache while the rows use it. */
static void strip_rows(const task *t, int64_t strip, int64_t first, int64_t count) {
    const unit *u = t->u;
    double c[ROWS][W];
    float f[ROWS][W], total[ROWS][W];
    uint8_t bad[ROWS][W];
    int64_t begin = strip * W, width = t->columns - begin < W ? t->columns - begin : W, k = t->k;
    int64_t segment = u->promotion_interval > 0 ? u->promotion_interval : k, block = u->products > 0 ? u->products : k;
    const float *b = t->b + strip * k * W;
    const int16_t *eb = t->eb + strip * k * W;
    memset(bad, 0, sizeof bad);
    for (int64_t r = 0; r < count; r++)
        for (int w = 0; w < W; w++) {
            float x = t->c && w < width ? t->c[(first + r) * t->columns + begin + w] : 0.0f;
            total[r][w] = x;
            f[r][w] = u->promotion_interval > 0 ? 0.0f : x;
            c[r][w] = f[r][w];
        }
    for (int64_t from = 0; from < k; from += segment) {
        int64_t end = k - from < segment ? k : from + segment;
        for (int64_t l = from; l < end; l += block) {
            int32_t n = (int32_t)(end - l < block ? end - l : block);
            for (int64_t r = 0; r < count; r++) {
                const float *a = t->a + (first + r) * k + l;
                if (u->order == ALIGNED)
                    step_aligned(u, a, t->ea + (first + r) * k + l, b + l * W, eb + l * W, n, c[r], bad[r]);
                else if (u->order == FMA) step_fma(u, a, b + l * W, n, f[r]);
                else {
                    float s[W];
                    tree(u, a, b + l * W, 0, (int32_t)block, n, s);
                    for (int w = 0; w < W; w++) f[r][w] = flushed(u, f[r][w] + s[w]);
                }
            }
        }
        if (u->promotion_interval > 0)
            for (int64_t r = 0; r < count; r++)
                for (int w = 0; w < W; w++) {
                    total[r][w] += u->order == ALIGNED ? (float)c[r][w] : f[r][w];
                    c[r][w] = 0;
                    f[r][w] = 0;
                }
    }
    for (int64_t r = 0; r < count; r++)
        for (int64_t w = 0; w < width; w++) {
            int64_t i = (first + r) * t->columns + begin + w;
            t->out[i] = u->promotion_interval > 0 ? total[r][w] : u->order == ALIGNED ? (float)c[r][w] : f[r][w];
            t->undecided[i] = bad[r][w];
        }
}

static void *take_items(void *argument) {
    task *t = argument;
    for (;;) {
        int64_t i = __atomic_fetch_add(&t->next, 1, __ATOMIC_RELAXED);
        if (i >= t->items) return 0;
        int64_t first = i % t->row_groups * ROWS, left = t->rows - first;
        strip_rows(t, i / t->row_groups, first, left < ROWS ? left : ROWS);
    }
}

enum { MAX_THREADS = 256 };

/* out [rows, columns] = a [rows, k] times the packed b [ceil(columns / W)][k][W], plus c [rows, columns] or null. */
void qq_dot(const unit *u, const float *a, const int16_t *ea, const float *b, const int16_t *eb, const float *c,
            float *out, uint8_t *undecided, int64_t rows, int64_t columns, int64_t k, int32_t threads) {
    int64_t groups = (rows + ROWS - 1) / ROWS, strips = (columns + W - 1) / W;
    task t = {u, a, b, c, ea, eb, out, undecided, rows, columns, k, groups, groups * strips, 0};
    pthread_t ids[MAX_THREADS];
    int32_t started = 0;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    while (started < threads - 1 && started < t.items - 1 && pthread_create(&ids[started], 0, take_items, &t) == 0)
        started++;
    take_items(&t);
    for (int32_t i = 0; i < started; i++) pthread_join(ids[i], 0);
}
