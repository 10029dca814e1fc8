// One decoding step of a dense decoder with grouped-query attention: from a token's vector to its logits.
//
// All layers run in one call, for at most a few tokens of different texts at the same position; products and threads
// are those of fast_linear.c, whose functions come as pointers. Attention is split by key head and by stretches of
// the context, whose softmaxes are merged (as in flash decoding).

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define STRETCHES 64
#define SHORTEST 64
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef float four __attribute__((vector_size(16), aligned(4), may_alias));

enum activation { SILU, GELU_TANH, GELU };

struct pool;
struct linear;
typedef void (*work)(void *context, int64_t begin, int64_t end);

struct threads {
  struct pool *pool;
  int (*linear)(struct pool *, const struct linear *, const float *, int64_t, float *, int64_t, int64_t);
  void (*parallel)(struct pool *, work, void *, int64_t items, int64_t step);
};

// Linears that read the same input; the outputs of the parts lie one behind the other, sizes[i] of each.
struct group {
  const struct linear *const *parts;
  const int64_t *sizes;
  int64_t count, size;
};

// Norms that a family lacks are NULL. window: positions that a query sees, 0 for all. local: the second rotation.
struct layer {
  struct group attention_input, attention_output, mlp_input, mlp_hidden;
  const float *input_norm, *query_norm, *key_norm, *attention_output_norm, *mlp_norm, *mlp_output_norm;
  int64_t window, local;
};

struct model {
  const struct layer *layers;
  const float *final_norm;
  struct group head;
  int64_t count, hidden, inner, heads, key_heads, head_size, rotary, interleaved, activation;
  float epsilon, scale, score_cap;  // score_cap 0: none
};

// keys, values: [layers, batch, key heads, capacity, head_size]. cosine, sine: [2][rotary / 2] of the position.
struct state {
  float *keys, *values;
  const float *cosine, *sine;
  int64_t batch, capacity, position;
};

INLINE floats load(const float *p) { return *(const floats *)p; }
INLINE void store(float *p, floats x) { *(floats *)p = x; }
INLINE floats all(float x) { return x - (floats){0}; }

INLINE float sum_of(floats x) {
  eight e[2];
  memcpy(e, &x, sizeof e);
  e[0] += e[1];
  four f[2];
  memcpy(f, e, sizeof f);
  f[0] += f[1];
  return (f[0][0] + f[0][1]) + (f[0][2] + f[0][3]);
}

INLINE float dot(const float *a, const float *b, int64_t n) {
  floats sum[2] = {{0}};
  int64_t i = 0;
  for (; i + 2 * LANES <= n; i += 2 * LANES) {
    sum[0] += load(a + i) * load(b + i);
    sum[1] += load(a + i + LANES) * load(b + i + LANES);
  }
  float rest = 0;
  for (; i < n; i++) rest += a[i] * b[i];
  return sum_of(sum[0] + sum[1]) + rest;
}

INLINE floats pick(ints mask, floats yes, floats no) {
  return (floats)(((ints)yes & mask) | ((ints)no & ~mask));
}

// exp of x, clamped to -87 .. 88: 2^n times the series of the rest, which is at most ln(2) / 2.
INLINE floats exponential(floats x) {
  x = pick(x < -87.0f, all(-87.0f), x);
  x = pick(x > 88.0f, all(88.0f), x);
  const floats shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: what follows the point is rounded away
  const floats n = shifted - 12582912.0f;
  const floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  floats p = all(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return (floats)((ints)p + ((ints)shifted << 23));
}

static void rms_norm(const float *x, const float *weight, float *y, int64_t n, float epsilon) {
  const float factor = 1.0f / sqrtf(dot(x, x, n) / (float)n + epsilon);
  for (int64_t i = 0; i < n; i++) y[i] = x[i] * factor * weight[i];
}

static int run_group(const struct threads *t, const struct group *group, const float *x, int64_t x_stride, float *y,
                     int64_t m) {
  int failed = 0;
  for (int64_t i = 0; i < group->count; y += group->sizes[i++])
    failed |= t->linear(t->pool, group->parts[i], x, x_stride, y, group->size, m);
  return failed;
}

static void rotate(float *x, const struct model *model, const float *cosine, const float *sine) {
  const int64_t half = model->rotary / 2;
  float first[half], second[half];
  for (int64_t i = 0; i < half; i++) {
    first[i] = x[model->interleaved ? 2 * i : i];
    second[i] = x[model->interleaved ? 2 * i + 1 : i + half];
  }
  for (int64_t i = 0; i < half; i++) {
    x[i] = first[i] * cosine[i] - second[i] * sine[i];
    x[i + half] = second[i] * cosine[i] + first[i] * sine[i];
  }
}

// ---- attention ----

struct attention {
  const struct model *model;
  const struct state *state;
  const float *query;           // [batch][stride]
  const float *keys, *values;   // of the layer
  float *scores;                // [batch * heads][capacity]
  float *mixed, *most, *total;  // of each [batch * heads][STRETCHES], mixed [head_size]
  int64_t stride, first, stretch, stretches;
};

// One key head and one stretch of the context, for all queries that share the head.
static void attend_stretch(const struct attention *a, int64_t item) {
  const struct model *model = a->model;
  const int64_t size = model->head_size, shared = model->heads / model->key_heads;
  const int64_t part = item % a->stretches, head = item / a->stretches, text = head / model->key_heads;
  const int64_t begin = a->first + part * a->stretch, end = a->state->position + 1;
  const int64_t count = end - begin < a->stretch ? end - begin : a->stretch;
  const float *keys = a->keys + (head * a->state->capacity + begin) * size;
  const float *values = a->values + (head * a->state->capacity + begin) * size;
  const int64_t first_query = head % model->key_heads * shared;
  const float *query = a->query + text * a->stride + first_query * size;
  const int64_t row = text * model->heads + first_query;
  for (int64_t s = 0; s < count; s++)
    for (int64_t q = 0; q < shared; q++)
      a->scores[(row + q) * a->state->capacity + part * a->stretch + s] =
          dot(query + q * size, keys + s * size, size) * model->scale;
  for (int64_t q = 0; q < shared; q++) {
    float *scores = a->scores + (row + q) * a->state->capacity + part * a->stretch;
    if (model->score_cap > 0)
      for (int64_t s = 0; s < count; s++) scores[s] = tanhf(scores[s] / model->score_cap) * model->score_cap;
    float most = scores[0], total = 0;
    for (int64_t s = 1; s < count; s++) most = scores[s] > most ? scores[s] : most;
    for (int64_t s = 0; s < count; s += LANES) {
      const int64_t n = count - s < LANES ? count - s : LANES;
      float some[LANES] = {0};
      memcpy(some, scores + s, sizeof(float) * (size_t)n);
      store(some, exponential(load(some) - most));
      for (int64_t i = 0; i < n; i++) total += some[i];
      memcpy(scores + s, some, sizeof(float) * (size_t)n);
    }
    const int64_t place = (row + q) * STRETCHES + part;
    float *mixed = a->mixed + place * size;
    int64_t d = 0;
    for (; d + 4 * LANES <= size; d += 4 * LANES) {
      floats sum[4] = {{0}};
      for (int64_t s = 0; s < count; s++)
        for (int i = 0; i < 4; i++) sum[i] += load(values + s * size + d + i * LANES) * scores[s];
      for (int i = 0; i < 4; i++) store(mixed + d + i * LANES, sum[i]);
    }
    if (d < size) memset(mixed + d, 0, sizeof(float) * (size_t)(size - d));
    for (int64_t s = 0; s < count && d < size; s++)
      for (int64_t i = d; i < size; i++) mixed[i] += values[s * size + i] * scores[s];
    a->most[place] = most, a->total[place] = total;
  }
}

static void attend_items(void *context, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; item++) attend_stretch(context, item);
}

static void merge(const struct attention *a, int64_t row, float *out) {
  const int64_t size = a->model->head_size, place = row * STRETCHES;
  float most = a->most[place], total = 0;
  for (int64_t i = 1; i < a->stretches; i++) most = a->most[place + i] > most ? a->most[place + i] : most;
  memset(out, 0, sizeof(float) * (size_t)size);
  for (int64_t i = 0; i < a->stretches; i++) {
    const float share = expf(a->most[place + i] - most), *mixed = a->mixed + (place + i) * size;
    total += share * a->total[place + i];
    for (int64_t d = 0; d < size; d++) out[d] += share * mixed[d];
  }
  for (int64_t d = 0; d < size; d++) out[d] /= total;
}

static void attend(const struct threads *t, struct attention *a, int64_t window, float *out) {
  const struct model *model = a->model;
  const int64_t length = a->state->position + 1, span = window > 0 && window < length ? window : length;
  a->first = length - span;
  a->stretch = (span + STRETCHES - 1) / STRETCHES;
  a->stretch = a->stretch < SHORTEST ? SHORTEST : (a->stretch + LANES - 1) / LANES * LANES;
  a->stretches = (span + a->stretch - 1) / a->stretch;
  t->parallel(t->pool, attend_items, a, a->state->batch * model->key_heads * a->stretches, 1);
  for (int64_t row = 0; row < a->state->batch * model->heads; row++) merge(a, row, out + row * model->head_size);
}

// Norms and turns queries and keys in place, and stores keys and values behind those of the cache.
static void place_keys(const struct model *model, const struct layer *layer, const struct attention *a, float *qkv) {
  const int64_t size = model->head_size, half = model->rotary / 2 * layer->local;
  const float *cosine = a->state->cosine + half, *sine = a->state->sine + half;
  for (int64_t head = 0; head < model->heads + model->key_heads; head++) {
    const float *norm = head < model->heads ? layer->query_norm : layer->key_norm;
    if (norm) rms_norm(qkv + head * size, norm, qkv + head * size, size, model->epsilon);
    rotate(qkv + head * size, model, cosine, sine);
  }
}

static void activate(float *gate, const float *up, int64_t n, int64_t kind) {
  if (kind == GELU) {
    for (int64_t i = 0; i < n; i++) gate[i] *= 0.5f * (1.0f + erff(gate[i] * 0.70710678f)) * up[i];
    return;
  }
  for (int64_t i = 0; i < n; i += LANES) {
    const size_t bytes = sizeof(float) * (size_t)(n - i < LANES ? n - i : LANES);
    float a[LANES] = {0}, b[LANES] = {0};
    memcpy(a, gate + i, bytes), memcpy(b, up + i, bytes);
    const floats g = load(a);
    floats y = g;  // both are g * sigmoid(y): tanh(z) = 2 * sigmoid(2 z) - 1
    if (kind == GELU_TANH) y = (g + g * g * g * 0.044715f) * 1.59576912f;
    store(a, g / (exponential(-y) + 1.0f) * load(b));
    memcpy(gate + i, a, bytes);
  }
}

static void add(float *hidden, float *x, const float *norm, const struct model *model) {
  if (norm) rms_norm(x, norm, x, model->hidden, model->epsilon);
  for (int64_t i = 0; i < model->hidden; i++) hidden[i] += x[i];
}

// Floats of scratch that a step of this batch and capacity needs.
int64_t qq_decode_room(const struct model *model, int64_t batch, int64_t capacity) {
  const int64_t outputs = (model->heads + 2 * model->key_heads) * model->head_size;
  const int64_t row = model->hidden + outputs + model->heads * model->head_size + 2 * model->inner;
  return batch * (row + model->heads * (capacity + LANES + STRETCHES * (model->head_size + 2)));
}

// hidden [batch][hidden]: the tokens' vectors, used up. logits: [batch][head.size]. 0, or -1 without memory.
int qq_decode(const struct threads *t, const struct model *model, const struct state *state, float *hidden,
              float *scratch, float *logits) {
  const int64_t batch = state->batch, size = model->hidden, head_size = model->head_size;
  const int64_t query_size = model->heads * head_size, key_size = model->key_heads * head_size;
  const int64_t outputs = query_size + 2 * key_size, rows = batch * model->heads;
  float *normed = scratch, *qkv = normed + batch * size, *mixed = qkv + batch * outputs;
  float *inner = mixed + batch * query_size, *rest = inner + batch * 2 * model->inner;
  struct attention a = {.model = model, .state = state, .query = qkv, .stride = outputs};
  a.most = rest, a.total = a.most + rows * STRETCHES, a.mixed = a.total + rows * STRETCHES;
  a.scores = a.mixed + rows * STRETCHES * head_size;
  const int64_t per_layer = batch * model->key_heads * state->capacity * head_size;
  int failed = 0;
  for (int64_t index = 0; index < model->count; index++) {
    const struct layer *layer = model->layers + index;
    float *keys = state->keys + index * per_layer, *values = state->values + index * per_layer;
    for (int64_t b = 0; b < batch; b++)
      rms_norm(hidden + b * size, layer->input_norm, normed + b * size, size, model->epsilon);
    failed |= run_group(t, &layer->attention_input, normed, size, qkv, batch);
    for (int64_t b = 0; b < batch; b++) {
      float *row = qkv + b * outputs;
      place_keys(model, layer, &a, row);
      for (int64_t head = 0; head < model->key_heads; head++) {
        const int64_t at = ((b * model->key_heads + head) * state->capacity + state->position) * head_size;
        memcpy(keys + at, row + query_size + head * head_size, sizeof(float) * (size_t)head_size);
        memcpy(values + at, row + query_size + key_size + head * head_size, sizeof(float) * (size_t)head_size);
      }
    }
    a.keys = keys, a.values = values;
    attend(t, &a, layer->window, mixed);
    failed |= run_group(t, &layer->attention_output, mixed, query_size, normed, batch);
    for (int64_t b = 0; b < batch; b++) {
      add(hidden + b * size, normed + b * size, layer->attention_output_norm, model);
      rms_norm(hidden + b * size, layer->mlp_norm, normed + b * size, size, model->epsilon);
    }
    failed |= run_group(t, &layer->mlp_input, normed, size, inner, batch);
    for (int64_t b = 0; b < batch; b++) {
      float *gate = inner + b * 2 * model->inner;
      activate(gate, gate + model->inner, model->inner, model->activation);
    }
    failed |= run_group(t, &layer->mlp_hidden, inner, 2 * model->inner, normed, batch);
    for (int64_t b = 0; b < batch; b++) add(hidden + b * size, normed + b * size, layer->mlp_output_norm, model);
  }
  for (int64_t b = 0; b < batch; b++)
    rms_norm(hidden + b * size, model->final_norm, normed + b * size, size, model->epsilon);
  failed |= run_group(t, &model->head, normed, size, logits, batch);
  return failed;
}
