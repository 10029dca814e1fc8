/* The error that each candidate grid leaves in each region of a weight. Plain C ABI; the caller splits rows of
 * regions over threads. Compiled without contraction of multiply and add, so that the torch twin gives the same
 * bits. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16

static inline float ladder_value(float x, const float *steps) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t field = (bits >> 23) & 255;
    return rintf(x * steps[256 + field]) * steps[field];
}

static inline float term(float w, float importance, float scale, float least, float most, const float *steps,
                         int uniform, int cubed) {
    float x = w / scale;
    x = x < least ? least : x;
    x = x > most ? most : x;
    x = uniform ? rintf(x) : ladder_value(x, steps);
    float difference = w - x * scale;
    float error = difference * difference * importance;
    return cubed ? error * fabsf(difference) : error;
}

/* Part of a row: sixteen float32 lanes by column, folded in halves. */
static inline float row_error(const float *w, const float *importance, int64_t width, float scale, float least,
                              float most, const float *steps, int uniform, int cubed) {
    float lanes[LANES] = {0};
    int64_t whole = width / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int64_t lane = 0; lane < LANES; lane++)
            lanes[lane] += term(w[i + lane], importance[i + lane], scale, least, most, steps, uniform, cubed);
    for (int64_t i = whole; i < width; i++)
        lanes[i - whole] += term(w[i], importance[i], scale, least, most, steps, uniform, cubed);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

/* weight: [rows, columns]; importance: [columns]; regions of region_rows x region_columns, those at the edge
 * partial. scale, zero, errors: [candidates, down, across]; zero may be NULL. Only rows of regions first..last-1
 * are worked on. cubed: magnitudes to the third power instead of squares, where the grid is uniform. */
void grid_errors(const float *weight, const float *importance, int64_t rows, int64_t columns, int64_t region_rows,
                 int64_t region_columns, int64_t first, int64_t last, const float *scale, const float *zero,
                 int64_t candidates, const float *steps, float low, float high, int uniform, int cubed,
                 double *errors) {
    int64_t down = (rows + region_rows - 1) / region_rows, across = (columns + region_columns - 1) / region_columns;
    for (int64_t region = first; region < last; region++) {
        int64_t end = (region + 1) * region_rows < rows ? (region + 1) * region_rows : rows;
        for (int64_t row = region * region_rows; row < end; row++) {
            for (int64_t part = 0; part < across; part++) {
                int64_t begin = part * region_columns;
                int64_t width = begin + region_columns < columns ? region_columns : columns - begin;
                const float *w = weight + row * columns + begin, *m = importance + begin;
                for (int64_t c = 0; c < candidates; c++) {
                    int64_t at = (c * down + region) * across + part;
                    float z = zero ? zero[at] : 0.0f, s = scale[at];
                    float l = low - z, h = high - z;
                    errors[at] += !uniform ? row_error(w, m, width, s, l, h, steps, 0, 0)
                                  : cubed  ? row_error(w, m, width, s, l, h, steps, 1, 1)
                                           : row_error(w, m, width, s, l, h, steps, 1, 0);
                }
            }
        }
    }
}
