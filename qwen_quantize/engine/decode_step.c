// One decoding step of a dense decoder with grouped-query attention: from a token's vector to its logits.
//
// All layers run in one call, for at most a few tokens of different texts at the same position; products and threads
// are those of fast_linear.c, whose functions come as pointers. Attention is split by key head and by stretches of
// the context, whose softmaxes are merged (as in flash decoding). Keys and values lie in pages, those of old tokens in
// a file perhaps: stretches begin at the same positions wherever they come from, so that sums are the same.

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define LANES 16
#define STRETCH 64  // tokens; divides a page
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

// keys, values: [layers][pages]; a page of values is [batch, key heads, tokens, head_size], one of keys the same or,
// if interleaved, [batch, key heads, tokens / LANES, head_size, LANES]. NULL: a full page in `file`, which begins at
// place[layer] + page * page_bytes. The last page may hold fewer tokens. cosine, sine: [2][rotary / 2] of the position.
struct state {
  float *const *keys, *const *values;
  const int64_t *key_places, *value_places;
  const float *cosine, *sine;
  int64_t batch, capacity, position, page, pages, page_bytes, file, interleaved;
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
  const float *query;                  // [batch][stride]
  float *const *keys, *const *values;  // of the layer's pages
  float *scores;                       // [batch * heads][stretches][STRETCH]
  float *mixed, *most, *total;         // of each [batch * heads][stretches], mixed [head_size]
  int64_t key_place, value_place;      // of the layer in a page of the file
  int64_t stride, first, stretches;
  int failed;  // any thread may set it
};

// Whether `count` floats came from the file.
static int read_floats(int64_t file, float *x, int64_t count, int64_t place) {
  for (int64_t left = count * (int64_t)sizeof(float); left;) {
    const ssize_t got = pread((int)file, (char *)x + (count * (int64_t)sizeof(float) - left), (size_t)left, place);
    if (got <= 0) return 0;
    left -= got, place += got;
  }
  return 1;
}

static int64_t rounded_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// Scores of `count` tokens behind the first `lead` of the lines at `keys`, LANES tokens at a time.
static void score_lines(const float *query, const float *keys, int64_t size, int64_t lead, int64_t count, float *scores) {
  for (int64_t line = 0; line < lead + count; line += LANES, keys += LANES * size) {
    floats sum[4] = {{0}};
    int64_t d = 0;
    for (; d + 4 <= size; d += 4)
      for (int i = 0; i < 4; i++) sum[i] += load(keys + (d + i) * LANES) * query[d + i];
    for (; d < size; d++) sum[0] += load(keys + d * LANES) * query[d];
    float some[LANES];
    store(some, (sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (int64_t i = line < lead ? lead - line : 0; i < LANES && line + i < lead + count; i++)
      scores[line + i - lead] = some[i];
  }
}

// One key head and one stretch of the context, for all queries that share the head. keys: of the tokens from
// begin - lead on; values: from begin on.
static void attend_tokens(struct attention *a, int64_t head, int64_t part, const float *keys, const float *values,
                          int64_t lead, int64_t count) {
  const struct model *model = a->model;
  const int64_t size = model->head_size, shared = model->heads / model->key_heads, text = head / model->key_heads;
  const int64_t first_query = head % model->key_heads * shared;
  const float *query = a->query + text * a->stride + first_query * size;
  const int64_t row = text * model->heads + first_query;
  for (int64_t q = 0; q < shared; q++) {
    float *scores = a->scores + ((row + q) * a->stretches + part) * STRETCH;
    if (a->state->interleaved)
      score_lines(query + q * size, keys, size, lead, count, scores);
    else
      for (int64_t s = 0; s < count; s++) scores[s] = dot(query + q * size, keys + s * size, size);
    for (int64_t s = 0; s < count; s++) scores[s] *= model->scale;
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
    const int64_t place = (row + q) * a->stretches + part;
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

// Of a page in the file; apart, because the room it takes on the stack is seldom needed.
static __attribute__((noinline)) void attend_file(struct attention *a, int64_t head, int64_t part, int64_t page,
                                                  int64_t within, int64_t lead, int64_t count) {
  const struct state *state = a->state;
  const int64_t size = a->model->head_size, place = page * state->page_bytes, token = (head * state->page + within) * size;
  const int64_t in_keys = state->interleaved ? rounded_up(lead + count) : count;
  float keys[STRETCH * size], values[STRETCH * size];
  const int64_t key_place = a->key_place + place + (token - lead * size) * (int64_t)sizeof(float);
  const int64_t value_place = a->value_place + place + token * (int64_t)sizeof(float);
  if (read_floats(state->file, keys, in_keys * size, key_place) &&
      read_floats(state->file, values, count * size, value_place))
    attend_tokens(a, head, part, keys, values, lead, count);
  else
    a->failed = 1;
}

static void attend_stretch(struct attention *a, int64_t item) {
  const struct state *state = a->state;
  const int64_t size = a->model->head_size, part = item % a->stretches, head = item / a->stretches;
  const int64_t stretch = (a->first / STRETCH + part) * STRETCH;
  const int64_t begin = stretch > a->first ? stretch : a->first;
  const int64_t end = stretch + STRETCH <= state->position ? stretch + STRETCH : state->position + 1;
  const int64_t page = begin / state->page, within = begin % state->page, base = page * state->page;
  const int64_t lead = state->interleaved ? begin % LANES : 0;
  if (!a->keys[page]) {
    attend_file(a, head, part, page, within, lead, end - begin);
    return;
  }
  const int64_t tokens = state->capacity - base < state->page ? state->capacity - base : state->page;
  const int64_t in_keys = state->interleaved ? rounded_up(tokens) : tokens;
  const float *keys = a->keys[page] + (head * in_keys + within - lead) * size;
  attend_tokens(a, head, part, keys, a->values[page] + (head * tokens + within) * size, lead, end - begin);
}

static void attend_items(void *context, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; item++) attend_stretch(context, item);
}

static void merge(const struct attention *a, int64_t row, float *out) {
  const int64_t size = a->model->head_size, place = row * a->stretches;
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
  a->stretches = a->state->position / STRETCH - a->first / STRETCH + 1;
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
  return batch * (row + model->heads * (capacity / STRETCH + 1) * (STRETCH + model->head_size + 2));
}

// hidden [batch][hidden]: the tokens' vectors, used up. logits: [batch][head.size]. 0, -1 without memory, or -2 if the file
// fails.
int qq_decode(const struct threads *t, const struct model *model, const struct state *state, float *hidden,
              float *scratch, float *logits) {
  const int64_t batch = state->batch, size = model->hidden, head_size = model->head_size;
  const int64_t query_size = model->heads * head_size, key_size = model->key_heads * head_size;
  const int64_t outputs = query_size + 2 * key_size, rows = batch * model->heads;
  float *normed = scratch, *qkv = normed + batch * size, *mixed = qkv + batch * outputs;
  float *inner = mixed + batch * query_size, *rest = inner + batch * 2 * model->inner;
  struct attention a = {.model = model, .state = state, .query = qkv, .stride = outputs};
  const int64_t most_stretches = rows * (state->capacity / STRETCH + 1);
  a.most = rest, a.total = a.most + most_stretches, a.mixed = a.total + most_stretches;
  a.scores = a.mixed + most_stretches * head_size;
  const int64_t page = state->position / state->page, within = state->position % state->page;
  const int64_t left = state->capacity - page * state->page, tokens = left < state->page ? left : state->page;
  const int64_t in_keys = state->interleaved ? rounded_up(tokens) : tokens;
  const int64_t line = within / LANES * LANES, lane = within % LANES;
  int failed = 0;
  for (int64_t index = 0; index < model->count; index++) {
    const struct layer *layer = model->layers + index;
    a.keys = state->keys + index * state->pages, a.values = state->values + index * state->pages;
    a.key_place = state->key_places[index], a.value_place = state->value_places[index];
    for (int64_t b = 0; b < batch; b++)
      rms_norm(hidden + b * size, layer->input_norm, normed + b * size, size, model->epsilon);
    failed |= run_group(t, &layer->attention_input, normed, size, qkv, batch);
    for (int64_t b = 0; b < batch; b++) {
      float *row = qkv + b * outputs;
      place_keys(model, layer, &a, row);
      for (int64_t head = 0; head < model->key_heads; head++) {
        const int64_t place = b * model->key_heads + head;
        const float *key = row + query_size + head * head_size;
        float *keys = a.keys[page] + place * in_keys * head_size;
        if (state->interleaved)
          for (int64_t d = 0; d < head_size; d++) keys[line * head_size + d * LANES + lane] = key[d];
        else
          memcpy(keys + within * head_size, key, sizeof(float) * (size_t)head_size);
        memcpy(a.values[page] + (place * tokens + within) * head_size, key + key_size, sizeof(float) * (size_t)head_size);
      }
    }
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
  return a.failed ? -2 : failed;
}
