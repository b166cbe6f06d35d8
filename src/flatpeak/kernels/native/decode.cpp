// The forward pass of a decoder-only transformer over rows of tokens, and the sampling of the next tokens; float32.
//
// A row is a token. It attends to a shared memory (the prompt, common to the group) and to its own memory (the
// completion). Rows that read a prompt extend the shared memory. The bits of a row's result depend neither on other
// rows nor on the number of threads: the row alone determines the order of every sum.
#include <vector>
#include "products.h"

struct Product { const float *weight, *bias; };  // panels [N / PANEL][K][PANEL]; bias [N / PANEL][PANEL] or null
struct Norm { const float *weight, *bias; };     // LayerNorm with a bias, RMSNorm without
struct Layer { Norm before, between; Product qkv, out, up, down; Norm q_norm, k_norm; };  // q_norm, k_norm: or null
struct Model {
  int64_t layers, hidden, inner, heads, kv_heads, dim, vocabulary, gelu;
  float epsilon, scale;
  const float *embedding, *positions, *cosines, *sines;  // either positions or the rope tables are null
  Norm last;
  Product head;
  const Layer* layer;
};
// Per layer and key head, a memory has keys [columns / WIDTH][D][WIDTH], values [columns][D padded to half a vector].
struct Memory { float* base; int64_t capacity, length; };  // columns: allocated; filled, including the row's token
struct Row { int64_t token, output; Memory shared, own; };  // output: row of the logits, or -1; own may be null
INLINE int64_t position(const Row& row) { return row.shared.length + row.own.length - 1; }

enum Epilogue { STORE, ADD, SWIGLU, GELU };
constexpr int CHUNK = 128, QUERIES = 4;  // rows per pass through the layers, queries per attention call
constexpr int TERMS = 128;  // of a product per chain of additions, because a huge term rounds all terms after it

template <int M>
INLINE void tile(const float* x, int64_t ldx, const float* w, int K, const float* bias, float* y, int64_t ldy, int end,
                 Ahead ahead) {
  Vec acc[M][TILE];
  for (int m = 0; m < M; m++)
    for (int i = 0; i < TILE; i++) acc[m][i] = bias ? load(bias + WIDTH * i) : Vec{};
  accumulate(acc, x, ldx, 1, w, PANEL, WIDTH, std::min(K, TERMS), ahead);
  for (int k = TERMS; k < K; k += TERMS) {
    Vec sums[M][TILE] = {};
    Ahead rest = {ahead.next + k * ahead.step, ahead.step};
    accumulate(sums, x + k, ldx, 1, w + (int64_t)k * PANEL, PANEL, WIDTH, std::min(K - k, TERMS), rest);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int i = 0; i < TILE; i++) acc[m][i] += sums[m][i];
  }
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

// Y = X W^T + b and its epilogue, called by all threads. Rows form tiles of similar height. Each tile prefetches its
// share of the next panel, because few rows wait for memory longer than they compute. A single row reads in order.
static void multiply(const float* X, int64_t ldx, int R, int K, const Product& by, int64_t N, float* Y, int64_t ldy,
                     Epilogue end, int threads) {
  int panels = (int)(padded(N, PANEL) / PANEL), tiles = (R + TALL - 1) / TALL;
  int parts = std::min(tiles, (threads + panels - 1) / panels);
#pragma omp for schedule(static)
  for (int item = 0; item < panels * parts; item++) {
    int n = item / parts * PANEL, part = item % parts;
    const float* bias = by.bias ? by.bias + n : nullptr;
    int first = tiles * part / parts, last = tiles * (part + 1) / parts;
    int64_t share = R > 1 ? (PANEL + last - first - 1) / (last - first) : 0;
    for (int t = first; t < last; t++) {
      Ahead ahead = {by.weight + (int64_t)K * (n + PANEL + (t - first) * share), share};
      int m = (int)((int64_t)R * t / tiles), height = (int)((int64_t)R * (t + 1) / tiles) - m;
      float* y = Y + m * ldy + (end == SWIGLU ? n / 2 : n);
      with_count<TALL>(height, [&](auto M) __attribute__((always_inline)) {
        tile<M.value>(X + m * ldx, ldx, by.weight + (int64_t)n * K, K, bias, y, ldy, end, ahead);
      });
    }
  }
}

static void normalize(const float* x, Norm norm, float epsilon, int n, float* y) {
  float mean = norm.bias ? total(n, [](auto v) __attribute__((always_inline)) { return v; }, x) / n : 0;
  float squares = total(n, [&](auto v) __attribute__((always_inline)) { return (v - mean) * (v - mean); }, x);
  float factor = 1.f / std::sqrt(squares / n + epsilon);
  for (int i = 0; i < n; i++) y[i] = norm.weight[i] * ((x[i] - mean) * factor) + (norm.bias ? norm.bias[i] : 0.f);
}

struct Pass {  // the state of one chunk of rows
  const Model& m;
  Row* rows;
  const int64_t* order;
  int count, threads;
  int repeats = (int)(m.heads / m.kv_heads), D = (int)m.dim, Dv = (int)padded(m.dim, WIDTH / 2);
  int64_t width = padded(m.hidden, PANEL), wide = padded((m.heads + 2 * m.kv_heads) * D, PANEL);
  int64_t joined = m.heads * D, inner_width = padded(m.inner, PANEL), most = 0;  // columns of scores
  Floats x{count * width}, normed{count * width}, qkv{count * wide}, attended{count * joined}, inner{count * inner_width};
  const Row& row(int r) const { return rows[order[r]]; }
  float* keys(const Memory& memory, int64_t layer, int64_t head) const {
    return memory.base + (layer * m.kv_heads + head) * padded(memory.capacity, WIDTH) * (D + Dv);
  }
  float* values(const Memory& memory, int64_t layer, int64_t head) const {
    return keys(memory, layer, head) + padded(memory.capacity, WIDTH) * D;
  }
};

static void rotate(float* x, const float* cosines, const float* sines, int half) {
  for (int i = 0; i < half; i++) {
    float u = x[i], v = x[half + i];
    x[i] = u * cosines[i] - v * sines[i];
    x[half + i] = v * cosines[i] + u * sines[i];
  }
}

// Apply norms and rope to a row's queries and keys; store its key and value in the last column of its memory.
static void remember(const Pass& pass, int64_t l, int r) {
  const Model& m = pass.m;
  const Row& row = pass.row(r);
  int D = pass.D;
  int64_t angles = position(row) * (D / 2);
  float *qkv = pass.qkv + r * pass.wide, *key = qkv + m.heads * D;
  for (float* x = qkv; x < key + m.kv_heads * D; x += D) {
    const Norm& norm = x < key ? m.layer[l].q_norm : m.layer[l].k_norm;
    if (norm.weight) normalize(x, norm, m.epsilon, D, x);
    if (m.cosines) rotate(x, m.cosines + angles, m.sines + angles, D / 2);
  }
  const Memory& memory = row.own.base ? row.own : row.shared;
  int64_t at = memory.length - 1;
  for (int h = 0; h < m.kv_heads; h++, key += D) {
    float* keys = pass.keys(memory, l, h) + at / WIDTH * WIDTH * D + at % WIDTH;
    for (int d = 0; d < D; d++) keys[d * WIDTH] = key[d];
    memcpy(pass.values(memory, l, h) + at * pass.Dv, key + m.kv_heads * D, 4 * D);
  }
}

// Attention of one key head for queries first ... last - 1, which share a prompt; query n belongs to row n / repeats.
static void attend(const Pass& pass, int64_t l, int head, int first, int last, float* scores) {
  int count = last - first, D = pass.D, Dv = pass.Dv;
  float *out = scores + count * pass.most, *queries = out + count * Dv;
  const Row* row[QUERIES];
  int64_t before = 0;
  auto row_of = [&](int i) { return (first + i) / pass.repeats; };
  auto head_of = [&](int i) { return head * pass.repeats + (first + i) % pass.repeats; };
  memset(out, 0, 4 * count * Dv);
  for (int i = 0; i < count; i++) {
    row[i] = &pass.row(row_of(i));
    memcpy(queries + i * D, pass.qkv + row_of(i) * pass.wide + head_of(i) * D, 4 * D);
    before = std::max(before, padded(row[i]->shared.length, WIDTH));
  }
  // For a memory that queries i ... end - 1 share: scores from column `from` on, minus infinity past a row's end; then
  // the values, summed with these weights.
  auto score_memory = [&](int i, int end, Memory Row::* which, int64_t from, int64_t columns) {
    float* to = scores + i * pass.most + from;
    const float* keys = pass.keys(row[i]->*which, l, head);
    score<QUERIES>(end - i, queries + i * D, D, keys, columns, D, pass.m.scale, to, pass.most);
    for (; i < end; i++, to += pass.most) std::fill(to + (row[i]->*which).length, to + columns, -INFINITY);
  };
  auto weigh_memory = [&](int i, int end, Memory Row::* which, int64_t from) {
    int64_t filled = 0;
    for (int n = i; n < end; n++) filled = std::max(filled, (row[n]->*which).length);
    const float *weights = scores + i * pass.most + from, *values = pass.values(row[i]->*which, l, head);
    weigh<QUERIES>(end - i, weights, pass.most, 1, values, Dv, filled, Dv, out + i * Dv, Dv);
  };
  score_memory(0, count, &Row::shared, 0, before);
  for (int i = 0, end = 0; i < count; i = end) {
    while (end < count && row[end] == row[i]) end++;
    int64_t columns = padded(row[i]->own.length, WIDTH);
    if (columns) score_memory(i, end, &Row::own, before, columns);
    for (int n = i; n < end; n++) {
      float *weights = scores + n * pass.most, inverse = 1.f / exponentials(weights, before + columns, 1.f).total;
      for (int64_t j = 0; j < before + columns; j += WIDTH) store(weights + j, load(weights + j) * inverse);
    }
    if (columns) weigh_memory(i, end, &Row::own, before);
  }
  weigh_memory(0, count, &Row::shared, 0);
  for (int i = 0; i < count; i++)
    memcpy(pass.attended + row_of(i) * pass.joined + head_of(i) * D, out + i * Dv, 4 * D);
}

static void normalize_rows(const Pass& pass, const Norm& norm) {  // called by all threads
#pragma omp for schedule(static)
  for (int r = 0; r < pass.count; r++)
    normalize(pass.x + r * pass.width, norm, pass.m.epsilon, (int)pass.m.hidden, pass.normed + r * pass.width);
}

// All layers, called by all threads; `spans` holds the bounds of the queries that share an attention call.
static void run_layers(const Pass& pass, const std::vector<int>& spans, float* scores) {
  const Model& m = pass.m;
  int64_t columns = m.gelu ? m.inner : 2 * padded(m.inner, PANEL / 2);  // half panels of gate and up alternate
  auto product = [&](const float* X, int64_t ldx, int64_t K, const Product& by, int64_t N, float* Y, int64_t ldy,
                     Epilogue end) { multiply(X, ldx, pass.count, (int)K, by, N, Y, ldy, end, pass.threads); };
  for (int64_t l = 0; l < m.layers; l++) {
    const Layer& layer = m.layer[l];
    normalize_rows(pass, layer.before);
    product(pass.normed, pass.width, m.hidden, layer.qkv, (m.heads + 2 * m.kv_heads) * m.dim, pass.qkv, pass.wide, STORE);
#pragma omp for schedule(static)
    for (int r = 0; r < pass.count; r++) remember(pass, l, r);
#pragma omp for schedule(dynamic)
    for (int item = 0; item < ((int)spans.size() - 1) * (int)m.kv_heads; item++) {
      int span = item / (int)m.kv_heads;
      attend(pass, l, item % (int)m.kv_heads, spans[span], spans[span + 1], scores);
    }
    product(pass.attended, pass.joined, pass.joined, layer.out, m.hidden, pass.x, pass.width, ADD);
    normalize_rows(pass, layer.between);
    product(pass.normed, pass.width, m.hidden, layer.up, columns, pass.inner, pass.inner_width, m.gelu ? GELU : SWIGLU);
    product(pass.inner, pass.inner_width, m.inner, layer.down, m.hidden, pass.x, pass.width, ADD);
  }
}

// Runs a chunk of rows from tokens to the final hidden states, which are written at the rows' output indices.
static void run_chunk(Pass pass, float* hidden) {
  const Model& m = pass.m;
  int64_t shared = 0, own = 0;
  std::vector<int> spans;  // up to QUERIES queries of rows that share a prompt, or of one row
  for (int r = 0; r < pass.count; r++) {
    shared = std::max(shared, padded(pass.row(r).shared.length, WIDTH));
    own = std::max(own, padded(pass.row(r).own.length, WIDTH));
    int query = r * pass.repeats;
    bool alike = r && pass.row(r).shared.base == pass.row(r - 1).shared.base;
    if (!alike || query + pass.repeats - spans.back() > QUERIES)
      for (int n = query; n < query + pass.repeats; n += QUERIES) spans.push_back(n);
  }
  spans.push_back(pass.count * pass.repeats);
  pass.most = shared + own;
#pragma omp parallel num_threads(pass.threads)
  {
    Floats scores(QUERIES * (pass.most + pass.Dv + pass.D));
#pragma omp for schedule(static)
    for (int r = 0; r < pass.count; r++) {
      float* x = pass.x + r * pass.width;
      memcpy(x, m.embedding + pass.row(r).token * m.hidden, 4 * m.hidden);
      const float* learned = m.positions + (m.positions ? position(pass.row(r)) * m.hidden : 0);
      for (int i = 0; m.positions && i < m.hidden; i++) x[i] += learned[i];
    }
    run_layers(pass, spans, scores);
#pragma omp for schedule(static)
    for (int r = 0; r < pass.count; r++)
      if (int64_t output = pass.row(r).output; output >= 0)
        normalize(pass.x + r * pass.width, m.last, m.epsilon, (int)m.hidden, hidden + output * pass.width);
  }
}

extern "C" {
// The order keeps a prompt's rows in sequence and a group's rows adjacent. Logits [outputs][stride].
void forward(const Model* m, Row* rows, const int64_t* order, int64_t count, int64_t outputs, float* logits,
             int64_t stride, int64_t threads) {
  int64_t width = padded(m->hidden, PANEL);
  std::unique_ptr<float[]> hidden(new float[outputs * width]());  // zeros for outputs without a row
  for (int64_t first = 0; first < count; first += CHUNK)
    run_chunk({*m, rows, order + first, (int)std::min<int64_t>(CHUNK, count - first), (int)threads}, hidden.get());
#pragma omp parallel num_threads((int)threads)
  multiply(hidden.get(), width, (int)outputs, (int)m->hidden, m->head, m->vocabulary, logits, stride, STORE, (int)threads);
}

const char* compiler() { return __VERSION__; }
int64_t panel() { return PANEL; }
int64_t vector_width() { return WIDTH; }
}

// ---- Sampling
struct Draws {  // the state of `count` completions, each at its own position; see CompletionBuffer
  const int64_t *keys, *ends;
  int64_t *tokens, *lengths;
  float* logprobs;
  uint8_t *ended, *stopped;
  int64_t num_ends, count, limit;
  float inverse_temperature;
};

static uint64_t mix(uint64_t v) {  // SplitMix64
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9ull;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EBull;
  return v ^ (v >> 31);
}

// The first token whose cumulative weight exceeds u times the total; finds its block of tokens first.
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
  while (last > 0 && !(weights[last] > 0)) last--;  // after rounding: the last positive weight
  return last;
}

extern "C" void draw(const Draws* d, const float* logits, int64_t stride, int64_t vocabulary, const int64_t* completions,
                     int64_t rows, int64_t* drawn) {
  int64_t columns = padded(vocabulary, WIDTH);
  Floats weights(columns);
  for (int64_t r = 0; r < rows; r++) {
    int64_t c = completions[r], at = d->lengths[c];
    drawn[r] = 0;
    if (c == d->count) continue;  // the dummy completion
    memcpy(weights, logits + r * stride, 4 * vocabulary);
    std::fill(weights + vocabulary, weights + columns, -INFINITY);
    exponentials(weights, columns, d->inverse_temperature);
    double u = (mix((uint64_t)d->keys[c] + (uint64_t)(at + 1) * 0x9E3779B97F4A7C15ull) >> 11) * 0x1p-53, total;
    int64_t token = drawn[r] = choose(weights, columns, u, &total);
    d->tokens[c * d->limit + at] = token;
    d->logprobs[c * d->limit + at] = (float)std::log(weights[token] / total);
    d->lengths[c] = at + 1;
    d->stopped[c] = std::find(d->ends, d->ends + d->num_ends, token) != d->ends + d->num_ends;
    d->ended[c] = d->stopped[c] || at + 1 == d->limit;
  }
}
