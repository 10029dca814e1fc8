// Products with packed weights: y = x W^T + bias, straight from int4, int8 or E4M3 codes, or from float32 rows.
//
// Sixteen rows make a tile, and a vector holds one number of each of them: sums need no reduction across lanes,
// scales of a tile are one load, and a partial tile ends in rows whose scale is 0. Vectors are those of the compiler
// (GCC and Clang lower them to what the machine has); only the dot product of bytes and the decoding of E4M3 have
// forms of their own for AVX-512 VNNI, AVX2 and F16C.

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define LANES 16
#define BLOCK 32  // inputs that share an int8 scale; columns are padded to a multiple of it
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint8_t bytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t shorts __attribute__((vector_size(32), aligned(2), may_alias));

enum kind { FLOAT_ROWS, INT4, INT8, E4M3 };
enum input { FLOAT_INPUT, INT8_BLOCKS, INT8_TOKEN, INT16_BLOCKS };

// codes: FLOAT_ROWS [rows, columns] float32; else tiles, [padded / 8][16][4] bytes of two nibbles (columns k .. k + 3
// low, k + 4 .. k + 7 high), [padded / 4][16][4] bytes, or [padded][16] bytes. scale: [tiles][groups][16]. zero: as
// scale, or none: then 8 for INT4 and 128 for INT8. group: columns of one scale, a multiple of 32.
struct linear {
  const void *codes;
  const float *scale;
  const uint8_t *zero;
  const float *bias;
  int64_t rows, columns, padded, group;
  int32_t kind, input;
};

// ---- threads: who is awake takes the next few items until none is left; nobody waits for a thread that sleeps ----

typedef void (*work)(void *context, int64_t begin, int64_t end);

// gate: a job's number above 16 bits, the bit that closes it, and how many workers are in it. A worker joins an open
// job once; the caller opens it, works along, closes it and waits for those inside.
#define CLOSED 0x8000ull
#define JOB(gate) ((gate) >> 16)

struct pool {
  pthread_mutex_t lock, turn;
  pthread_cond_t wake;
  atomic_ullong gate;
  atomic_int sleeping, stop;
  atomic_llong next;
  work run;
  void *context;
  int64_t items, step;
  int workers;
  size_t room;
  void *scratch;
  pthread_t thread[];
};

INLINE void relax(int spins) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
  if (spins % 32 == 31) sched_yield();  // both threads may have been put on one core
}

static void take(struct pool *pool) {
  for (;;) {
    int64_t begin = atomic_fetch_add(&pool->next, pool->step);
    if (begin >= pool->items) return;
    int64_t end = begin + pool->step;
    pool->run(pool->context, begin, end < pool->items ? end : pool->items);
  }
}

// Whether there is something that the worker has not joined yet.
INLINE int open_to(struct pool *pool, unsigned long long seen) {
  unsigned long long gate = atomic_load(&pool->gate);
  return (JOB(gate) != seen && !(gate & CLOSED)) || atomic_load(&pool->stop);
}

static void *worker(void *argument) {
  struct pool *pool = argument;
  unsigned long long seen = 0;
  for (;;) {
    for (int spins = 0; !open_to(pool, seen) && spins < 20000; spins++) relax(spins);
    if (!open_to(pool, seen)) {
      pthread_mutex_lock(&pool->lock);
      atomic_fetch_add(&pool->sleeping, 1);
      while (!open_to(pool, seen)) pthread_cond_wait(&pool->wake, &pool->lock);
      atomic_fetch_sub(&pool->sleeping, 1);
      pthread_mutex_unlock(&pool->lock);
    }
    if (atomic_load(&pool->stop)) return NULL;
    unsigned long long gate = atomic_load(&pool->gate);
    if ((gate & CLOSED) || !atomic_compare_exchange_strong(&pool->gate, &gate, gate + 1)) continue;
    seen = JOB(gate);
    take(pool);
    atomic_fetch_sub(&pool->gate, 1);
  }
}

static void wake_sleepers(struct pool *pool) {
  if (!atomic_load(&pool->sleeping)) return;
  pthread_mutex_lock(&pool->lock);
  pthread_cond_broadcast(&pool->wake);
  pthread_mutex_unlock(&pool->lock);
}

// A pool of `threads`, the caller's included; fewer where the system gives no more, NULL without memory.
struct pool *qq_pool_new(int threads) {
  int wanted = threads > 1 ? threads - 1 : 0;
  struct pool *pool = calloc(1, sizeof *pool + sizeof(pthread_t) * (size_t)wanted);
  if (pool == NULL) return NULL;
  atomic_init(&pool->gate, CLOSED);
  pthread_mutex_init(&pool->lock, NULL);
  pthread_mutex_init(&pool->turn, NULL);
  pthread_cond_init(&pool->wake, NULL);
  while (pool->workers < wanted && !pthread_create(&pool->thread[pool->workers], NULL, worker, pool)) pool->workers++;
  return pool;
}

void qq_pool_free(struct pool *pool) {
  atomic_store(&pool->stop, 1);
  wake_sleepers(pool);
  for (int i = 0; i < pool->workers; i++) pthread_join(pool->thread[i], NULL);
  free(pool->scratch);
  free(pool);
}

// run(context, begin, end) on ranges that cover 0 .. items, each of at most `step`. The caller has the pool's turn.
void qq_parallel(struct pool *pool, work run, void *context, int64_t items, int64_t step) {
  if (pool->workers == 0 || items <= step) {
    if (items > 0) run(context, 0, items);
    return;
  }
  pool->run = run, pool->context = context, pool->items = items, pool->step = step;
  atomic_store(&pool->next, 0);
  atomic_store(&pool->gate, (JOB(atomic_load(&pool->gate)) + 1) << 16);
  wake_sleepers(pool);
  take(pool);
  atomic_fetch_or(&pool->gate, CLOSED);
  for (int spins = 0; (atomic_load(&pool->gate) & (CLOSED - 1)) > 0; spins++) relax(spins);
}

void qq_pool_enter(struct pool *pool) { pthread_mutex_lock(&pool->turn); }
void qq_pool_leave(struct pool *pool) { pthread_mutex_unlock(&pool->turn); }

// ---- vectors ----

INLINE floats load(const float *p) { return *(const floats *)p; }
INLINE floats all(float x) { return x - (floats){0}; }
INLINE floats to_floats(ints x) { return __builtin_convertvector(x, floats); }

// sum + the dot products of four unsigned bytes in each lane with four signed ones. AVX2 multiplies pairs into 16
// bits, which would overflow with wide codes: those are split in nibbles.
INLINE ints dot_bytes(ints sum, ints codes, int32_t input, const int narrow) {
#if defined(__AVX512VNNI__)
  (void)narrow;
  return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(input));
#elif defined(__AVX2__)
  const __m256i a = _mm256_set1_epi32(input), one = _mm256_set1_epi16(1), nibble = _mm256_set1_epi8(15);
  __m256i part[2];
  memcpy(part, &codes, sizeof part);
  for (int i = 0; i < 2; i++) {
    __m256i low = narrow ? part[i] : _mm256_and_si256(part[i], nibble);
    __m256i pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(low, a), one);
    if (!narrow) {
      __m256i high = _mm256_and_si256(_mm256_srli_epi16(part[i], 4), nibble);
      __m256i more = _mm256_madd_epi16(_mm256_maddubs_epi16(high, a), one);
      pairs = _mm256_add_epi32(pairs, _mm256_slli_epi32(more, 4));
    }
    part[i] = pairs;
  }
  ints dots;
  memcpy(&dots, part, sizeof dots);
  return sum + dots;
#else
  (void)narrow;
  for (int i = 0; i < 4; i++) sum += ((codes >> (8 * i)) & 255) * (int32_t)(int8_t)((uint32_t)input >> (8 * i));
  return sum;
#endif
}

// Sixteen E4M3 codes, none of them NaN, times 2^-8: as halves, which have one exponent bit more, they are that.
INLINE floats decode_e4m3(const uint8_t *codes) {
#if defined(__AVX512F__)
  shorts wide = __builtin_convertvector(*(const bytes *)codes, shorts);
  shorts half = ((wide & 0x80) << 8) | ((wide & 0x7f) << 7);
  return (floats)_mm512_cvtph_ps((__m256i)half);
#else
  ints wide = __builtin_convertvector(*(const bytes *)codes, ints);
  ints magnitude = wide & 0x7f, tiny = magnitude < 8;  // subnormals: one binade up, less the hidden one
  ints bits = (magnitude << 20) + (112 << 23) + (tiny & (1 << 23));
  floats value = (floats)bits - (floats)(tiny & 0x38800000);  // 2^-14
  return (floats)((ints)value | ((wide & 0x80) << 24));
#endif
}

// ---- the tiles ----

struct task {
  const struct linear *linear;
  const float *x;        // [m][stride]
  const int8_t *codes;   // [m][padded], the input as int8; of INT16_BLOCKS [2][m][padded]: 128 times these, and these
  const float *scale;    // [m][padded / 32]
  const int32_t *sum;    // [m][padded / 32], of the codes
  float *y;
  int64_t m, x_stride, y_stride;
};

INLINE void put(const struct task *task, int64_t tile, int64_t row, floats y) {
  const struct linear *l = task->linear;
  int64_t first = tile * LANES, count = l->rows - first < LANES ? l->rows - first : LANES;
  float *out = task->y + row * task->y_stride + first;
  float *from = (float *)&y;
  if (l->bias) {
    for (int64_t i = 0; i < count; i++) out[i] = from[i] + l->bias[first + i];
  } else if (count == LANES) {
    *(floats *)out = y;
  } else {
    for (int64_t i = 0; i < count; i++) out[i] = from[i];
  }
}

INLINE ints zeros_of(const struct linear *l, int64_t at) {
  if (l->zero) return __builtin_convertvector(*(const bytes *)(l->zero + at), ints);
  return (l->kind == INT4 ? 8 : 128) - (ints){0};
}

// Integer inputs, rows at .. at + count - 1 of them.
INLINE void integer_tile(const struct task *task, int64_t tile, int64_t at, const int count, const int four,
                         const int wide) {
  const struct linear *l = task->linear;
  const int64_t blocks = l->padded / BLOCK, groups = (l->padded + l->group - 1) / l->group;
  const int64_t bytes_of_block = LANES * (four ? BLOCK / 2 : BLOCK);
  const uint8_t *codes = (const uint8_t *)l->codes + tile * blocks * bytes_of_block;
  floats y[4] = {{0}};
  for (int64_t group = 0, block = 0; group < groups; group++) {
    const int64_t place = (tile * groups + group) * LANES, last = (group + 1) * l->group / BLOCK;
    const ints zero = zeros_of(l, place);
    floats part[4] = {{0}};
    for (; block < blocks && block < last; block++, codes += bytes_of_block) {
      ints w[8];
      for (int i = 0; i < 8; i++) {
        const ints both = *(const ints *)(codes + (four ? i / 2 : i) * 64);
        w[i] = both;
        if (four) w[i] = (both >> (4 * (i % 2))) & 0x0f0f0f0f;
      }
      for (int r = 0; r < count; r++) {
        const int64_t row = at + r;
        int32_t input[8];
        memcpy(input, task->codes + row * l->padded + block * BLOCK, BLOCK);
        ints sum = {0};
        for (int i = 0; i < 8; i++) sum = dot_bytes(sum, w[i], input[i], four);
        if (wide) {
          memcpy(input, task->codes + (task->m + row) * l->padded + block * BLOCK, BLOCK);
          sum <<= 7;
          for (int i = 0; i < 8; i++) sum = dot_bytes(sum, w[i], input[i], four);
        }
        sum -= zero * task->sum[row * blocks + block];
        part[r] += to_floats(sum) * task->scale[row * blocks + block];
      }
    }
    const floats scale = load(l->scale + place);
    for (int r = 0; r < count; r++) y[r] += part[r] * scale;
  }
  for (int r = 0; r < count; r++) put(task, tile, at + r, y[r]);
}

// float32 inputs. INT4 and INT8 add values less 8 or 128, so that little is left to cancel for other zero points.
INLINE void float_tile(const struct task *task, int64_t tile, int64_t at, const int count, const int kind) {
  const struct linear *l = task->linear;
  const int64_t groups = (l->padded + l->group - 1) / l->group;
  const int64_t bytes_of_column = kind == INT4 ? LANES / 2 : LANES;
  const uint8_t *codes = (const uint8_t *)l->codes + tile * l->padded * bytes_of_column;
  const int per_vector = kind == INT4 ? 8 : 4;
  floats y[4] = {{0}};
  for (int64_t group = 0, k = 0; group < groups; group++) {
    const int64_t place = (tile * groups + group) * LANES;
    const int64_t end = (group + 1) * l->group < l->columns ? (group + 1) * l->group : l->columns;
    floats part[4][2] = {{{0}}};
    float total[4] = {0};
    for (; k < end; k += per_vector, codes += bytes_of_column * per_vector) {
      const int width = end - k < per_vector ? (int)(end - k) : per_vector;
      if (kind == E4M3) {
        for (int i = 0; i < width; i++) {
          const floats w = decode_e4m3(codes + i * LANES);
          for (int r = 0; r < count; r++) part[r][i & 1] += w * task->x[(at + r) * task->x_stride + k + i];
        }
        continue;
      }
      const ints packed = *(const ints *)codes ^ (int32_t)(kind == INT4 ? 0x88888888 : 0x80808080);
      for (int i = 0; i < per_vector; i++) {
        if (i >= width) break;
        // Of INT4, columns k .. k + 3 are the low nibbles of the four bytes.
        const int low = kind == INT8 ? 8 * i : i < 4 ? 8 * i : 8 * (i - 4) + 4;
        const int size = kind == INT4 ? 4 : 8;
        const floats w = to_floats((packed << (32 - size - low)) >> (32 - size));
        for (int r = 0; r < count; r++) {
          const float x = task->x[(at + r) * task->x_stride + k + i];
          part[r][i & 1] += w * x;
          if (l->zero) total[r] += x;
        }
      }
    }
    const floats scale = load(l->scale + place) * (kind == E4M3 ? 256.0f : 1.0f);
    for (int r = 0; r < count; r++) {
      floats sum = part[r][0] + part[r][1];
      if (l->zero && kind != E4M3) sum -= to_floats(zeros_of(l, place) - (kind == INT4 ? 8 : 128)) * total[r];
      y[r] += sum * scale;
    }
  }
  for (int r = 0; r < count; r++) put(task, tile, at + r, y[r]);
}

INLINE float sum_of(floats x) {
  float s = 0, *p = (float *)&x;
  for (int i = 0; i < LANES; i++) s += p[i];
  return s;
}

static void float_rows(const struct task *task, int64_t tile) {
  const struct linear *l = task->linear;
  const int64_t first = tile * LANES, last = first + LANES < l->rows ? first + LANES : l->rows;
  for (int64_t row = 0; row < task->m; row++) {
    const float *x = task->x + row * task->x_stride;
    for (int64_t n = first; n < last; n++) {
      const float *w = (const float *)l->codes + n * l->columns;
      floats sum[4] = {{0}};
      int64_t k = 0;
      for (; k + 64 <= l->columns; k += 64)
        for (int i = 0; i < 4; i++) sum[i] += load(w + k + 16 * i) * load(x + k + 16 * i);
      float y = sum_of((sum[0] + sum[1]) + (sum[2] + sum[3]));
      for (; k < l->columns; k++) y += w[k] * x[k];
      task->y[row * task->y_stride + n] = y + (l->bias ? l->bias[n] : 0);
    }
  }
}

static void run_tiles(void *context, int64_t begin, int64_t end) {
  const struct task *task = context;
  const int integers = task->linear->input != FLOAT_INPUT, wide = task->linear->input == INT16_BLOCKS;
  const int kind = task->linear->kind;
#define EACH(call4, call1)                                \
  for (int64_t tile = begin; tile < end; tile++) {        \
    int64_t at = 0;                                       \
    for (; at + 4 <= task->m; at += 4) call4;             \
    for (; at < task->m; at++) call1;                     \
  }
  if (kind == FLOAT_ROWS) {
    for (int64_t tile = begin; tile < end; tile++) float_rows(task, tile);
  } else if (integers && kind == INT4 && wide) {
    EACH(integer_tile(task, tile, at, 4, 1, 1), integer_tile(task, tile, at, 1, 1, 1))
  } else if (integers && kind == INT4) {
    EACH(integer_tile(task, tile, at, 4, 1, 0), integer_tile(task, tile, at, 1, 1, 0))
  } else if (integers && kind == INT8 && wide) {
    EACH(integer_tile(task, tile, at, 4, 0, 1), integer_tile(task, tile, at, 1, 0, 1))
  } else if (integers && kind == INT8) {
    EACH(integer_tile(task, tile, at, 4, 0, 0), integer_tile(task, tile, at, 1, 0, 0))
  } else if (kind == INT4) {
    EACH(float_tile(task, tile, at, 4, INT4), float_tile(task, tile, at, 1, INT4))
  } else if (kind == INT8) {
    EACH(float_tile(task, tile, at, 4, INT8), float_tile(task, tile, at, 1, INT8))
  } else {
    EACH(float_tile(task, tile, at, 4, E4M3), float_tile(task, tile, at, 1, E4M3))
  }
}

// ---- inputs as integers ----

static float largest(const float *x, int64_t n) {
  float most = 0;
  for (int64_t k = 0; k < n; k++) {
    const float size = __builtin_fabsf(x[k]);
    most = size > most ? size : most;
  }
  return most;
}

#define TINY 1e-30f  // blocks below it count as zeros: no quotient overflows

// As vLLM's kernels do it: times 127 / largest, to the nearest even, back with largest / 127. Two bytes reach 16256.
static void cast_rows(void *context, int64_t begin, int64_t end) {
  const struct task *task = context;
  const struct linear *l = task->linear;
  const int64_t blocks = l->padded / BLOCK;
  const int wide = l->input == INT16_BLOCKS, token = l->input == INT8_TOKEN;
  const float target = wide ? 16256.0f : 127.0f;
  for (int64_t row = begin; row < end; row++) {
    const float *x = task->x + row * task->x_stride;
    const float whole = token ? largest(x, l->columns) : 0;
    for (int64_t block = 0; block < blocks; block++) {
      int8_t *out = (int8_t *)task->codes + row * l->padded + block * BLOCK, *low = out + task->m * l->padded;
      const int64_t left = l->columns - block * BLOCK, n = left < BLOCK ? left : BLOCK;
      const float most = token ? whole : largest(x + block * BLOCK, n);
      const float inverse = most >= TINY ? target / most : 0;
      float values[BLOCK] = {0};
      int32_t codes[BLOCK], sum = 0;
      memcpy(values, x + block * BLOCK, sizeof(float) * (size_t)n);
      for (int k = 0; k < BLOCK; k++) codes[k] = (int32_t)__builtin_rintf(values[k] * inverse);
      for (int k = 0; k < BLOCK; k++) sum += codes[k];
      for (int k = 0; k < BLOCK; k++) out[k] = (int8_t)(wide ? (codes[k] + 64) >> 7 : codes[k]);
      for (int k = 0; k < BLOCK && wide; k++) low[k] = (int8_t)(codes[k] - 128 * out[k]);
      ((float *)task->scale)[row * blocks + block] = most / target;
      ((int32_t *)task->sum)[row * blocks + block] = sum;
    }
  }
}

// y [m][y_stride] of x [m][x_stride]; the caller has the pool's turn. 0, or -1 without memory.
int qq_linear(struct pool *pool, const struct linear *l, const float *x, int64_t x_stride, float *y,
              int64_t y_stride, int64_t m) {
  struct task task = {.linear = l, .x = x, .y = y, .m = m, .x_stride = x_stride, .y_stride = y_stride};
  if (l->input != FLOAT_INPUT) {
    const size_t blocks = (size_t)(m * (l->padded / BLOCK)), room = blocks * (2 * BLOCK + 8);
    if (pool->room < room) {
      free(pool->scratch);
      pool->scratch = malloc(room);
      pool->room = pool->scratch ? room : 0;
      if (!pool->scratch) return -1;
    }
    float *scale = pool->scratch;
    task.scale = scale, task.sum = (int32_t *)(scale + blocks), task.codes = (int8_t *)(scale + 2 * blocks);
    qq_parallel(pool, cast_rows, &task, m, 4);
  }
  const int64_t tiles = (l->rows + LANES - 1) / LANES, shares = 4 * (pool->workers + 1);
  qq_parallel(pool, run_tiles, &task, tiles, (tiles + shares - 1) / shares);
  return 0;
}
