// The forward pass of a decoder-only transformer over rows of tokens, and the draw of the next ones; float32.
//
// A row is a token. It attends to a shared memory (its prompt, which the group has in common) and to one of its own
// (its completion); a prompt is read with rows whose shared memory grows with them. No bit of a row's result depends on
// the other rows or on the number of threads: every sum runs over its terms in an order that the row alone decides.
#include "products.h"

struct Product { const float *weight, *bias; };  // panels [N / PANEL][K][PANEL]; a bias of as many columns, or null
struct Norm { const float *weight, *bias; };     // with a bias LayerNorm, without one RMSNorm
struct Layer { Norm before, between; Product qkv, out, up, down; const float *q_norm, *k_norm; };
struct Model {
  int64_t layers, hidden, inner, heads, kv_heads, dim, vocabulary, gelu;
  float epsilon, scale;
  const float *embedding, *positions, *cosines, *sines;  // positions or the tables of rope are null
  Norm last;
  Product head;
  const Layer* layer;
};
// A memory has, for each layer and key head, keys [columns / WIDTH][D][WIDTH] and then values [columns][D padded].
struct Memory { float* base; int64_t capacity, length; };  // columns to be had; filled, the row's own token included
struct Row { int64_t token, output; Memory shared, own; };  // output: its row of the logits, or -1; own may be null
INLINE int64_t position(const Row& row) { return row.shared.length + row.own.length - 1; }

enum Epilogue { STORE, ADD, SWIGLU, GELU };
constexpr int CHUNK = 128;  // rows that go through the layers together

INLINE Vec gelu(Vec x) { return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x)); }  // the tanh approximation

template <int M>
INLINE void tile(const float* x, int64_t ldx, const float* w, int K, const float* bias, float* y, int64_t ldy, int end) {
  Vec acc[M][TILE];
  const float* row[M];
  for (int m = 0; m < M; m++) {
    row[m] = x + m * ldx;
    for (int i = 0; i < TILE; i++) acc[m][i] = bias ? load(bias + WIDTH * i) : Vec{};
  }
  accumulate(acc, row, 1, w, PANEL, WIDTH, K);
#pragma GCC unroll 8
  for (int m = 0; m < M; m++, y += ldy) {
#pragma GCC unroll 4
    for (int i = 0; i < TILE; i++) {
      Vec v = acc[m][i];
      if (end == STORE) store(y + WIDTH * i, v);
      if (end == ADD) store(y + WIDTH * i, load(y + WIDTH * i) + v);
      if (end == GELU) store(y + WIDTH * i, gelu(v));
      if (end == SWIGLU && i < TILE / 2) store(y + WIDTH * i, v * sigmoid(v) * acc[m][i + TILE / 2]);
    }
  }
}

// Y = X W^T + b and what follows it, called by all threads. Rows are cut into tiles of similar height.
static void multiply(const float* X, int64_t ldx, int R, int K, const Product& by, int64_t N, float* Y, int64_t ldy,
                     Epilogue end, int threads) {
  int panels = (int)(padded(N, PANEL) / PANEL), tiles = (R + TALL - 1) / TALL;
  int parts = std::min(tiles, (threads + panels - 1) / panels);
#pragma omp for schedule(static)
  for (int item = 0; item < panels * parts; item++) {
    int n = item / parts * PANEL, part = item % parts;
    const float* bias = by.bias ? by.bias + n : nullptr;
    for (int t = tiles * part / parts; t < tiles * (part + 1) / parts; t++) {
      int m = (int)((int64_t)R * t / tiles), height = (int)((int64_t)R * (t + 1) / tiles) - m;
      float* y = Y + m * ldy + (end == SWIGLU ? n / 2 : n);
      with_count<TALL>(height, [&](auto M) __attribute__((always_inline)) {
        tile<M.value>(X + m * ldx, ldx, by.weight + (int64_t)n * K, K, bias, y, ldy, end);
      });
    }
  }
}

static void normalize(const float* x, Norm norm, float epsilon, int n, float* y) {
  float mean = 0;
  Vec partial{};
  int i = 0;
  if (norm.bias) {
    for (; i + WIDTH <= n; i += WIDTH) partial += load(x + i);
    mean = sum(partial);
    for (; i < n; i++) mean += x[i];
    mean /= n;
  }
  for (partial = Vec{}, i = 0; i + WIDTH <= n; i += WIDTH) {
    Vec v = load(x + i) - mean;
    partial += v * v;
  }
  float total = sum(partial);
  for (; i < n; i++) total += (x[i] - mean) * (x[i] - mean);
  float factor = 1.f / std::sqrt(total / n + epsilon);
  for (i = 0; i < n; i++) y[i] = norm.weight[i] * ((x[i] - mean) * factor) + (norm.bias ? norm.bias[i] : 0.f);
}

struct Pass {  // one chunk of rows on its way through the layers
  const Model& m;
  Row* const* rows;
  int count, threads;
  int64_t width, wide, most;  // the padded width of hidden states, of queries, keys and values, and of scores
  float *x, *normed, *qkv, *attended, *inner;
  int Dv() const { return (int)padded(m.dim, WIDTH); }
  int64_t head_size(const Memory& memory) const { return padded(memory.capacity, WIDTH) * (m.dim + Dv()); }
  float* keys(const Memory& memory, int64_t layer, int64_t head) const {
    return memory.base + (layer * m.kv_heads + head) * head_size(memory);
  }
  float* values(const Memory& memory, int64_t layer, int64_t head) const {
    return keys(memory, layer, head) + padded(memory.capacity, WIDTH) * m.dim;
  }
};

static void rotate(float* x, const float* cosines, const float* sines, int half) {
  for (int i = 0; i < half; i++) {
    float u = x[i], v = x[half + i];
    x[i] = u * cosines[i] - v * sines[i];
    x[half + i] = v * cosines[i] + u * sines[i];
  }
}

// Norms and rope of a row's queries and keys; its key and value go to the last column of its memory.
static void remember(const Pass& pass, int64_t l, int r) {
  const Model& m = pass.m;
  const Row& row = *pass.rows[r];
  float* qkv = pass.qkv + r * pass.wide;
  int D = (int)m.dim;
  for (int h = 0; h < m.heads + m.kv_heads; h++) {
    const float* norm = h < m.heads ? m.layer[l].q_norm : m.layer[l].k_norm;
    if (norm) normalize(qkv + h * D, Norm{norm, nullptr}, m.epsilon, D, qkv + h * D);
    if (m.cosines) rotate(qkv + h * D, m.cosines + position(row) * (D / 2), m.sines + position(row) * (D / 2), D / 2);
  }
  const Memory& memory = row.own.base ? row.own : row.shared;
  int64_t at = memory.length - 1;
  for (int h = 0; h < m.kv_heads; h++) {
    const float* key = qkv + (m.heads + h) * D;
    float* keys = pass.keys(memory, l, h) + at / WIDTH * WIDTH * D + at % WIDTH;
    for (int d = 0; d < D; d++) keys[d * WIDTH] = key[d];
    memcpy(pass.values(memory, l, h) + at * pass.Dv(), key + m.kv_heads * D, 4 * D);
  }
}

// Scores of the queries of rows first ... last - 1 over one memory that they share, minus infinity past a row's end.
static void score_memory(const Pass& pass, int64_t l, int head, int first, int last, Memory Row::* which, float* scores) {
  const Model& m = pass.m;
  int repeats = (int)(m.heads / m.kv_heads), queries = (last - first) * repeats, D = (int)m.dim;
  int64_t filled = 0;
  for (int r = first; r < last; r++) filled = std::max(filled, (pass.rows[r]->*which).length);
  const float* keys = pass.keys(pass.rows[first]->*which, l, head);
  for (int from = 0; from < queries; from += 4) {
    int count = std::min(4, queries - from);
    const float* q[4];
    float* s[4];
    for (int i = 0; i < count; i++) {
      int r = first + (from + i) / repeats;
      q[i] = pass.qkv + r * pass.wide + (head * repeats + (from + i) % repeats) * D;
      s[i] = scores + (from + i) * pass.most;
    }
    int columns = (int)padded(filled, WIDTH);
    with_count<4>(count, [&](auto Q) __attribute__((always_inline)) { score<Q.value>(q, keys, columns, D, m.scale, s); });
    for (int i = 0; i < count; i++)
      for (int64_t j = (pass.rows[first + (from + i) / repeats]->*which).length; j < columns; j++) s[i][j] = -INFINITY;
  }
}

// outputs += weights times the values of one memory, for the same queries
static void weigh_memory(const Pass& pass, int64_t l, int head, int first, int last, Memory Row::* which,
                         const float* weights, float* outputs) {
  int queries = (last - first) * (int)(pass.m.heads / pass.m.kv_heads), Dv = pass.Dv();
  int64_t filled = 0;
  for (int r = first; r < last; r++) filled = std::max(filled, (pass.rows[r]->*which).length);
  const float* values = pass.values(pass.rows[first]->*which, l, head);
  for (int from = 0; from < queries; from += 4) {
    int count = std::min(4, queries - from);
    const float* p[4];
    float* o[4];
    for (int i = 0; i < count; i++) p[i] = weights + (from + i) * pass.most, o[i] = outputs + (from + i) * Dv;
    with_count<4>(count, [&](auto Q) __attribute__((always_inline)) { weigh<Q.value>(p, 1, values, Dv, (int)filled, Dv, o); });
  }
}

// Attention of rows first ... last - 1, which share a prompt, for one key head.
static void attend(const Pass& pass, int64_t l, int head, int first, int last, float* scores) {
  const Model& m = pass.m;
  int repeats = (int)(m.heads / m.kv_heads), queries = (last - first) * repeats, Dv = pass.Dv();
  int64_t before = 0;
  for (int r = first; r < last; r++) before = std::max(before, padded(pass.rows[r]->shared.length, WIDTH));
  float* outputs = scores + queries * pass.most;
  memset(outputs, 0, 4 * queries * Dv);
  score_memory(pass, l, head, first, last, &Row::shared, scores);
  for (int r = first; r < last; r++) {
    int64_t own = pass.rows[r]->own.base ? padded(pass.rows[r]->own.length, WIDTH) : 0;
    float* mine = scores + (r - first) * repeats * pass.most;
    if (own) score_memory(pass, l, head, r, r + 1, &Row::own, mine + before);
    for (int g = 0; g < repeats; g++) {
      float* s = mine + g * pass.most;
      Vec best = load(s), total{};
      for (int64_t j = WIDTH; j < before + own; j += WIDTH) best = larger(best, load(s + j));
      best = fill(largest(best));
      for (int64_t j = 0; j < before + own; j += WIDTH) {
        Vec e = exponential(load(s + j) - best);
        total += e;
        store(s + j, e);
      }
      Vec inverse = fill(1.f / sum(total));
      for (int64_t j = 0; j < before + own; j += WIDTH) store(s + j, load(s + j) * inverse);
    }
    float* out = outputs + (r - first) * repeats * Dv;
    if (own) weigh_memory(pass, l, head, r, r + 1, &Row::own, mine + before, out);
  }
  weigh_memory(pass, l, head, first, last, &Row::shared, scores, outputs);
  for (int i = 0; i < queries; i++)
    memcpy(pass.attended + ((first + i / repeats) * m.heads + head * repeats + i % repeats) * m.dim, outputs + i * Dv,
           4 * m.dim);
}

// All layers, called by all threads; groups are the bounds of rows that are attended together.
static void run_layers(const Pass& pass, const int* groups, int num_groups, float* scores) {
  const Model& m = pass.m;
  int64_t attended = m.heads * m.dim, inner = padded(m.inner, PANEL);
  int64_t columns = m.gelu ? m.inner : 2 * padded(m.inner, PANEL / 2);  // half panels of the gate beside as much else
  for (int64_t l = 0; l < m.layers; l++) {
    const Layer& layer = m.layer[l];
#pragma omp for schedule(static)
    for (int r = 0; r < pass.count; r++)
      normalize(pass.x + r * pass.width, layer.before, m.epsilon, (int)m.hidden, pass.normed + r * pass.width);
    multiply(pass.normed, pass.width, pass.count, (int)m.hidden, layer.qkv, (m.heads + 2 * m.kv_heads) * m.dim, pass.qkv,
             pass.wide, STORE, pass.threads);
#pragma omp for schedule(static)
    for (int r = 0; r < pass.count; r++) remember(pass, l, r);
#pragma omp for schedule(dynamic)
    for (int item = 0; item < num_groups * (int)m.kv_heads; item++) {
      int g = item / (int)m.kv_heads;
      attend(pass, l, item % (int)m.kv_heads, groups[g], groups[g + 1], scores);
    }
    multiply(pass.attended, attended, pass.count, (int)attended, layer.out, m.hidden, pass.x, pass.width, ADD,
             pass.threads);
#pragma omp for schedule(static)
    for (int r = 0; r < pass.count; r++)
      normalize(pass.x + r * pass.width, layer.between, m.epsilon, (int)m.hidden, pass.normed + r * pass.width);
    multiply(pass.normed, pass.width, pass.count, (int)m.hidden, layer.up, columns, pass.inner, inner,
             m.gelu ? GELU : SWIGLU, pass.threads);
    multiply(pass.inner, inner, pass.count, (int)m.inner, layer.down, m.hidden, pass.x, pass.width, ADD, pass.threads);
  }
}


// Up to CHUNK rows from their tokens to the hidden states that logits are made of, each at its output's place.
static void run_chunk(const Model& m, Row* const* rows, int count, float* hidden, int threads) {
  int64_t width = padded(m.hidden, PANEL), wide = padded((m.heads + 2 * m.kv_heads) * m.dim, PANEL);
  int64_t inner = padded(m.inner, PANEL), attended = m.heads * m.dim, shared = 0, own = 0;
  int repeats = (int)(m.heads / m.kv_heads), together = std::max(1, 4 / repeats), num_groups = 0;
  int groups[CHUNK + 1];
  for (int r = 0; r < count; r++) {
    shared = std::max(shared, padded(rows[r]->shared.length, WIDTH));
    own = std::max(own, padded(rows[r]->own.length, WIDTH));
    bool alike = r && rows[r]->shared.base == rows[r - 1]->shared.base && r - groups[num_groups - 1] < together;
    if (!alike) groups[num_groups++] = r;
  }
  groups[num_groups] = count;
  std::unique_ptr<float[]> memory(new float[count * (2 * width + wide + attended + inner)]);
  Pass pass{m, rows, count, threads, width, wide, shared + own, memory.get(), nullptr, nullptr, nullptr, nullptr};
  pass.normed = pass.x + count * width;
  pass.qkv = pass.normed + count * width;
  pass.attended = pass.qkv + count * wide;
  pass.inner = pass.attended + count * attended;
#pragma omp parallel num_threads(threads)
  {
    std::unique_ptr<float[]> scores(new float[together * repeats * (pass.most + pass.Dv())]);
#pragma omp for schedule(static)
    for (int r = 0; r < count; r++) {
      float* x = pass.x + r * width;
      memcpy(x, m.embedding + rows[r]->token * m.hidden, 4 * m.hidden);
      const float* learned = m.positions + (m.positions ? position(*rows[r]) * m.hidden : 0);
      for (int i = 0; m.positions && i < m.hidden; i++) x[i] += learned[i];
    }
    run_layers(pass, groups, num_groups, scores.get());
#pragma omp for schedule(static)
    for (int r = 0; r < count; r++)
      if (rows[r]->output >= 0)
        normalize(pass.x + r * width, m.last, m.epsilon, (int)m.hidden, hidden + rows[r]->output * width);
  }
}

extern "C" {
// Rows in this order: a prompt's one after the other, those of a group side by side. Logits [outputs][stride].
void forward(const Model* m, Row* rows, const int64_t* order, int64_t count, int64_t outputs, float* logits,
             int64_t stride, int64_t threads) {
  int64_t width = padded(m->hidden, PANEL);
  std::unique_ptr<float[]> hidden(new float[outputs * width]());  // zeros where an output is of no row
  Row* chunk[CHUNK];
  for (int64_t first = 0; first < count; first += CHUNK) {
    int now = (int)std::min<int64_t>(CHUNK, count - first);
    for (int r = 0; r < now; r++) chunk[r] = rows + order[first + r];
    run_chunk(*m, chunk, now, hidden.get(), (int)threads);
  }
#pragma omp parallel num_threads((int)threads)
  multiply(hidden.get(), width, (int)outputs, (int)m->hidden, m->head, m->vocabulary, logits, stride, STORE, (int)threads);
}

const char* compiler() { return __VERSION__; }
int64_t panel() { return PANEL; }
int64_t vector_width() { return WIDTH; }
}

// ---- Draws
struct Draws {  // of `count` completions, each at a position of its own; see CompletionBuffer
  const int64_t *keys, *ends;
  int64_t num_ends, count, limit;
  int64_t *tokens, *lengths;
  float* logprobs;
  uint8_t *ended, *stopped;
  double inverse_temperature;
};

static uint64_t mix(uint64_t v) {  // SplitMix64
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9ull;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EBull;
  return v ^ (v >> 31);
}

// The first token whose cumulative weight exceeds u times the total: a block of tokens first, then within it.
static int64_t choose(const float* weights, int64_t columns, double u, double* total) {
  double reached = *total = 0;
  for (int64_t j = 0; j < columns; j += WIDTH) *total += sum(load(weights + j));
  double target = u * *total;
  int64_t j = 0, last = 0;
  for (; j + WIDTH < columns; j += WIDTH) {
    double block = sum(load(weights + j));
    if (reached + block > target) break;
    reached += block;
  }
  for (; j < columns; j++) {
    last = j;
    if ((reached += weights[j]) > target) return j;
  }
  while (last > 0 && !(weights[last] > 0)) last--;  // sums round: the last token of any weight
  return last;
}

extern "C" void draw(const Draws* d, const float* logits, int64_t stride, int64_t vocabulary, const int64_t* completions,
                     int64_t rows, int64_t* drawn) {
  int64_t columns = padded(vocabulary, WIDTH);
  std::unique_ptr<float[]> weights(new float[columns]);
  for (int64_t r = 0; r < rows; r++) {
    int64_t c = completions[r], at = d->lengths[c];
    drawn[r] = 0;
    if (c == d->count) continue;  // the dummy
    memcpy(weights.get(), logits + r * stride, 4 * vocabulary);
    for (int64_t j = vocabulary; j < columns; j++) weights[j] = -INFINITY;
    Vec best = load(weights.get());
    for (int64_t j = WIDTH; j < columns; j += WIDTH) best = larger(best, load(weights.get() + j));
    best = fill(largest(best));
    for (int64_t j = 0; j < columns; j += WIDTH)
      store(weights.get() + j, exponential((load(weights.get() + j) - best) * (float)d->inverse_temperature));
    double u = (mix((uint64_t)d->keys[c] + (uint64_t)(at + 1) * 0x9E3779B97F4A7C15ull) >> 11) * 0x1p-53, total;
    int64_t token = drawn[r] = choose(weights.get(), columns, u, &total);
    d->tokens[c * d->limit + at] = token;
    d->logprobs[c * d->limit + at] = (float)std::log(weights[token] / total);
    d->lengths[c] = at + 1;
    d->stopped[c] = std::find(d->ends, d->ends + d->num_ends, token) != d->ends + d->num_ends;
    d->ended[c] = d->stopped[c] || at + 1 == d->limit;
  }
}
