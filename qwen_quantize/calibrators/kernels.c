/* Inner loops of the calibrators that torch runs too slowly: error feedback along a block of columns, coordinate
 * descent on rounded weights, and the exponent-mantissa histogram of activations. Plain C ABI; the callers split rows over threads. Compiled
 * without contraction of multiply and add, so that the torch twins give the same bits. */

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

/* counts[2048]: bin = float32 exponent field (8 bits) followed by the top three mantissa bits. */
void exponent_mantissa_histogram(const float *x, int64_t n, int64_t *counts) {
    uint32_t lanes[4][2048];
    memset(lanes, 0, sizeof lanes);
    for (int64_t begin = 0; begin < n; begin += 1 << 24) { /* so that no 32-bit lane can overflow */
        int64_t end = begin + (1 << 24) < n ? begin + (1 << 24) : n;
        for (int64_t i = begin; i < end; i++) {
            uint32_t bits;
            memcpy(&bits, x + i, sizeof bits);
            lanes[i & 3][(bits >> 20) & 2047]++; /* four lanes break the chain of equal bins */
        }
        for (int lane = 0; lane < 4; lane++)
            for (int bin = 0; bin < 2048; bin++) counts[bin] += lanes[lane][bin];
        memset(lanes, 0, sizeof lanes);
    }
}
