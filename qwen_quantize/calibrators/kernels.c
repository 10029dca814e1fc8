/* Inner loops of the calibrators that torch runs too slowly: error feedback along a block of columns, coordinate
 * descent on rounded weights, and what is kept of activations. Plain C ABI; the callers split rows, or columns, over
 * threads. Compiled without contraction of multiply and add, so that the torch twins give the same bits. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Nearest on a ladder of values, ties to the even multiple of the step. steps: [512], the spacing at each float32
 * exponent field, then its reciprocals. */
static inline float nearest(float x, const float *steps) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t field = (bits >> 23) & 255;
    return rintf(x * steps[256 + field]) * steps[field];
}

/* The value that `x` becomes with this scale and zero point: (code - zero) * scale, low <= code <= high. */
static inline float quantize(float x, float scale, float zero, const float *steps, float low, float high) {
    float least = low - zero, most = high - zero;
    x = x / scale;
    x = x < least ? least : x;
    x = x > most ? most : x;
    return nearest(x, steps) * scale;
}

/* weights: [rows, stride], columns first..first+width-1 are worked on, left to right; each becomes its
 * quantized value, and its error, divided by the factor's diagonal, moves to the columns right of it inside
 * the block. errors: [rows, width]. factor: [width, width], upper. scale, zero: [rows, width]; zero may be NULL. */
void error_feedback(float *weights, int64_t stride, int64_t first, int64_t width, int64_t rows,
                    const float *factor, const float *scale, const float *zero, const float *steps, float low,
                    float high, float *errors) {
    for (int64_t row = 0; row < rows; row++) {
        float *w = weights + row * stride + first;
        const float *s = scale + row * width;
        float *e = errors + row * width;
        for (int64_t i = 0; i < width; i++) {
            const float *u = factor + i * width;
            float quantized = quantize(w[i], s[i], zero ? zero[row * width + i] : 0.0f, steps, low, high);
            float error = (w[i] - quantized) / u[i];
            e[i] = error;
            w[i] = quantized;
            for (int64_t j = i + 1; j < width; j++) w[j] -= error * u[j];
        }
    }
}

#define ROWS_TOGETHER 32 /* so that a row of the Hessian is read once for many rows of the weight */

/* One sweep of coordinate descent on (w - v) H (w - v)^T, columns in the given order: each value becomes the best
 * one for the others as they are. values, gradient = (w - v) H, scale, zero: [rows, columns]; zero may be NULL.
 * hessian: [columns, columns]. Returns how many values changed. */
int64_t refine(float *values, float *gradient, const float *scale, const float *zero, const float *hessian,
               const int64_t *order, int64_t rows, int64_t columns, const float *steps, float low, float high) {
    int64_t changed = 0;
    for (int64_t first = 0; first < rows; first += ROWS_TOGETHER) {
        int64_t last = first + ROWS_TOGETHER < rows ? first + ROWS_TOGETHER : rows;
        for (int64_t i = 0; i < columns; i++) {
            int64_t k = order[i];
            const float *h = hessian + k * columns;
            for (int64_t row = first; row < last; row++) {
                int64_t at = row * columns + k;
                float *g = gradient + row * columns;
                float best = values[at] + g[k] / h[k];
                float after = quantize(best, scale[at], zero ? zero[at] : 0.0f, steps, low, high);
                float change = after - values[at];
                if (!(change * (2.0f * g[k] - change * h[k]) > 0.0f)) continue;
                values[at] = after;
                changed++;
                for (int64_t j = 0; j < columns; j++) g[j] -= change * h[j];
            }
        }
    }
    return changed;
}

#define BINS 2048
#define BLOCK_ROWS 64
#define STRIP 256 /* columns whose sums stay in the first cache */

/* Four lanes of counts break the chain of equal bins. */
static void count(uint32_t lanes[4][BINS], const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        lanes[i & 3][(bits >> 20) & (BINS - 1)]++;
    }
}

static void add_counts(uint32_t lanes[4][BINS], int64_t *counts) {
    for (int lane = 0; lane < 4; lane++)
        for (int bin = 0; bin < BINS; bin++) counts[bin] += lanes[lane][bin];
    memset(lanes, 0, sizeof(uint32_t[4][BINS]));
}

/* Up to STRIP columns of up to BLOCK_ROWS rows, in float32, top to bottom. */
static void sum_strip(const float *x, const float *seen, const float *weight, int64_t stride, int64_t rows,
                      int64_t width, uint32_t *amax, double *total, double *squares, double *cross) {
    float t[STRIP] = {0}, q[STRIP] = {0}, c[STRIP] = {0};
    uint32_t m[STRIP] = {0};
    for (int64_t row = 0; row < rows; row++) {
        const float *v = x + row * stride, *s = seen + row * stride;
        float w = weight ? weight[row] : 1.0f;
        for (int64_t i = 0; i < width; i++) {
            uint32_t bits;
            memcpy(&bits, v + i, sizeof bits);
            bits &= 0x7fffffff;
            m[i] = bits > m[i] ? bits : m[i]; /* a NaN is the largest */
            t[i] += v[i];
            q[i] += v[i] * v[i];
            c[i] += s[i] * w * v[i];
        }
    }
    for (int64_t i = 0; i < width; i++) {
        amax[i] = m[i] > amax[i] ? m[i] : amax[i];
        total[i] += t[i];
        squares[i] += q[i];
        cross[i] += c[i];
    }
}

/* What calibration keeps of columns first..last-1 of x [rows, columns]: bits of the largest magnitude, sums of x, x^2
 * and weight * seen * x by column, each over blocks of 64 rows in float32 and over blocks in float64; counts[2048], a
 * bin for each float32 exponent field (8 bits) and the top three mantissa bits. weight: [rows] or NULL for ones. */
void column_sums(const float *x, const float *seen, const float *weight, int64_t rows, int64_t columns, int64_t first,
                 int64_t last, uint32_t *amax, double *total, double *squares, double *cross, int64_t *counts) {
    uint32_t lanes[4][BINS];
    memset(lanes, 0, sizeof lanes);
    int64_t counted = 0;
    for (int64_t row = 0; row < rows; row += BLOCK_ROWS) {
        int64_t height = rows - row < BLOCK_ROWS ? rows - row : BLOCK_ROWS;
        const float *w = weight ? weight + row : 0;
        for (int64_t at = first; at < last; at += STRIP) {
            const float *v = x + row * columns + at, *s = seen + row * columns + at;
            int64_t width = last - at < STRIP ? last - at : STRIP;
            sum_strip(v, s, w, columns, height, width, amax + at, total + at, squares + at, cross + at);
        }
        for (int64_t r = row; r < row + height; r++) count(lanes, x + r * columns + first, last - first);
        counted += height * (last - first);
        if (counted > 1 << 24) { /* so that no 32-bit lane can overflow */
            add_counts(lanes, counts);
            counted = 0;
        }
    }
    add_counts(lanes, counts);
}
