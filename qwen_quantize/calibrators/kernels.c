/* Inner loops of the calibrators that torch runs too slowly: error feedback along a block of columns, and the
 * exponent-mantissa histogram of activations. Plain C ABI; the callers split rows over threads. Compiled
 * without contraction of multiply and add, so that the torch twins give the same bits. */

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float power_of_two(int exponent) {
    uint32_t bits = (uint32_t)(exponent + 127) << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Nearest, ties to even, on a grid with `mantissa` fraction bits and smallest normal exponent `emin`. */
static inline float round_to_grid(float x, int mantissa, int emin, float maximum) {
    if (x > maximum) return maximum;
    if (x < -maximum) return -maximum;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    int exponent = (int)((bits >> 23) & 255) - 127;
    if (exponent < emin) exponent = emin;
    float rounded = rintf(x * power_of_two(mantissa - exponent)) * power_of_two(exponent - mantissa);
    return rounded > maximum ? maximum : (rounded < -maximum ? -maximum : rounded);
}

/* weights: [rows, stride], columns first..first+width-1 are worked on, left to right; each becomes its
 * quantized value, and its error, divided by the factor's diagonal, moves to the columns right of it inside
 * the block. errors: [rows, width]. factor: [width, width], upper. scale: [rows, width], powers of two. */
void error_feedback(float *weights, int64_t stride, int64_t first, int64_t width, int64_t rows,
                    const float *factor, const float *scale, int mantissa, int emin, float maximum,
                    float *errors) {
    for (int64_t row = 0; row < rows; row++) {
        float *w = weights + row * stride + first;
        const float *s = scale + row * width;
        float *e = errors + row * width;
        for (int64_t i = 0; i < width; i++) {
            const float *u = factor + i * width;
            float quantized = round_to_grid(w[i] / s[i], mantissa, emin, maximum) * s[i];
            float error = (w[i] - quantized) / u[i];
            e[i] = error;
            w[i] = quantized;
            for (int64_t j = i + 1; j < width; j++) w[j] -= error * u[j];
        }
    }
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
