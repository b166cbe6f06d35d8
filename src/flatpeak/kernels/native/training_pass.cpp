// The operations of a training pass apart from linear layers, forward and backward: attention over a packed row,
// RMSNorm, SwiGLU and GELU; float32. The bits of a result do not depend on the number of threads: one thread sums over
// the rows of the batch, or threads sum blocks of fixed size.
#include "products.h"

// ---- Attention. A group is a prompt and its responses; each is a segment of rows. dim is a multiple of half a vector.
struct Segment { int64_t first, length; };
struct Attention {
  int64_t heads, kv_heads, dim, groups;
  const int64_t* bounds;  // group g has segments bounds[g] (the prompt) to bounds[g + 1] - 1
  const Segment* segments;
  const float *q, *k, *v;
  int64_t q_row, k_row, v_row;  // row strides; the heads of a row are contiguous
  float scale;
};
constexpr int64_t BLOCK = 48;  // queries per block in the backward pass, whose weights are held to sum key gradients

struct Blocks {  // keys or values of a segment for one head, in the layout of `score`: [length / WIDTH][D][WIDTH]
  std::unique_ptr<float[]> memory;
  int64_t capacity = 0;
  void pack(const float* rows, int64_t stride, int64_t length, int64_t D) {
    int64_t size = padded(length, WIDTH) * D;
    if (size > capacity) memory.reset(new float[capacity = size]);
    if (length % WIDTH) memset(memory.get() + length / WIDTH * WIDTH * D, 0, 4 * WIDTH * D);
    for (int64_t j = 0; j < length; j++)
      for (int64_t d = 0; d < D; d++) memory[(j / WIDTH * D + d) * WIDTH + j % WIDTH] = rows[j * stride + d];
  }
};

struct Scratch {  // of one thread: blocks, and scores and their gradients for up to BLOCK queries
  Blocks prompt_keys, own_keys, prompt_values, own_values;
  std::unique_ptr<float[]> weights, slopes;
  int64_t columns;
};

// A segment and a query head. Queries see the prompt (of length 0 if the segment is a prompt) and earlier rows.
struct Head {
  const Attention& a;
  Segment prompt, own;
  int64_t kv_head, head;
  int64_t before() const { return padded(prompt.length, WIDTH); }
  const float* query(int64_t t) const { return a.q + (own.first + t) * a.q_row + head * a.dim; }
  const float* key(const Segment& segment) const { return a.k + segment.first * a.k_row + kv_head * a.dim; }
  const float* value(const Segment& segment) const { return a.v + segment.first * a.v_row + kv_head * a.dim; }
  int64_t result(int64_t t) const { return ((own.first + t) * a.heads + head) * a.dim; }  // in [S, heads, dim]
  int64_t gradient(const Segment& segment) const { return (segment.first * a.kv_heads + kv_head) * a.dim; }
};

// Products of up to TALL rows x, starting at query t, with the keys or values that they see.
static void score_seen(const Head& h, const float* x, int64_t stride, int count, int64_t t, const Blocks& prompt,
                       const Blocks& own, float scale, float* scores, int64_t columns) {
  score<TALL>(count, x, stride, prompt.memory.get(), h.before(), h.a.dim, scale, scores, columns);
  score<TALL>(count, x, stride, own.memory.get(), padded(t + count, WIDTH), h.a.dim, scale, scores + h.before(), columns);
}

// Write minus infinity to columns from `end` to `last`, rounded up to a multiple of WIDTH.
static void hide(float* scores, int64_t end, int64_t last) {
  for (int64_t j = end / WIDTH * WIDTH; j < last; j += WIDTH)
    store(scores + j, lanes() + (int)j < (int)end ? load(scores + j) : fill(-INFINITY));
}

static void hide_unseen(const Head& h, float* scores, int64_t t, int64_t last) {
  hide(scores, h.prompt.length, h.prompt.length);
  hide(scores + h.before(), t + 1, last + 1);
}

// out += weights times the rows (keys or values) of the prompt and the segment
static void weigh_seen(const Head& h, const float* weights, int64_t columns, int count, int64_t t, const float* prompt,
                       const float* own, int64_t stride, float* out, int64_t out_row) {
  weigh<TALL>(count, weights, columns, 1, prompt, stride, h.prompt.length, h.a.dim, out, out_row);
  weigh<TALL>(count, weights + h.before(), columns, 1, own, stride, t + count, h.a.dim, out, out_row);
}

static void attend(const Head& h, Scratch& s, float* output, float* log_sums) {
  for (int64_t t = 0; t < h.own.length; t += TALL) {
    int count = (int)std::min<int64_t>(TALL, h.own.length - t);
    int64_t columns = h.before() + padded(t + count, WIDTH);
    float inverse[TALL];
    score_seen(h, h.query(t), h.a.q_row, count, t, s.prompt_keys, s.own_keys, h.a.scale, s.weights.get(), s.columns);
    for (int i = 0; i < count; i++) {
      float* p = s.weights.get() + i * s.columns;
      hide_unseen(h, p, t + i, t + count - 1);
      Softmax softmax = exponentials(p, columns, 1.f);
      log_sums[(h.own.first + t + i) * h.a.heads + h.head] = softmax.largest + std::log(softmax.total);
      inverse[i] = 1.f / softmax.total;
    }
    weigh_seen(h, s.weights.get(), s.columns, count, t, h.value(h.prompt), h.value(h.own), h.a.v_row,
               output + h.result(t), h.a.heads * h.a.dim);
    for (int i = 0; i < count; i++)
      for (int64_t d = 0; d < h.a.dim; d++) output[h.result(t + i) + d] *= inverse[i];
  }
}

struct Gradients { const float *output, *log_sums, *of_output; float *q, *k, *v; };

// to[j] += sum over queries of weights[query][j] x[query], for keys j of one segment
static void sum_over_queries(const Head& h, const float* weights, int64_t columns, const float* x, int64_t stride,
                             int64_t queries, int64_t keys, float* to) {
  int64_t row = h.a.kv_heads * h.a.dim;
  for (int64_t j = 0; j < keys; j += TALL)
    weigh<TALL>((int)std::min<int64_t>(TALL, keys - j), weights + j, 1, columns, x, stride, queries, h.a.dim,
                to + j * row, row);
}

// Recompute the weights p = exp(score - log sum); d loss / d score = scale p (d p - sum over keys of p d p).
static void differentiate_weights(const Head& h, const Gradients& g, int64_t t, int64_t columns, float* p, float* ds) {
  const float *output = g.output + h.result(t), *gradient = g.of_output + h.result(t);
  float mean = total(h.a.dim, [](auto a, auto b) __attribute__((always_inline)) { return a * b; }, output, gradient);
  float log_sum = g.log_sums[(h.own.first + t) * h.a.heads + h.head];
  for (int64_t j = 0; j < columns; j += WIDTH) {
    Vec weight = exponential(load(p + j) - log_sum);
    store(p + j, weight);
    store(ds + j, weight * (load(ds + j) - mean) * h.a.scale);
  }
}

static void attend_backward(const Head& h, Scratch& s, const Gradients& g) {
  int64_t row = h.a.heads * h.a.dim;
  for (int64_t first = 0; first < h.own.length; first += BLOCK) {
    int64_t last = std::min(first + BLOCK, h.own.length), columns = h.before() + padded(last, WIDTH);
    for (int64_t t = first; t < last; t += TALL) {
      int count = (int)std::min<int64_t>(TALL, last - t);
      int64_t seen = h.before() + padded(t + count, WIDTH);
      float *p = s.weights.get() + (t - first) * s.columns, *ds = s.slopes.get() + (t - first) * s.columns;
      score_seen(h, h.query(t), h.a.q_row, count, t, s.prompt_keys, s.own_keys, h.a.scale, p, s.columns);
      score_seen(h, g.of_output + h.result(t), row, count, t, s.prompt_values, s.own_values, 1.f, ds, s.columns);
      for (int i = 0; i < count; i++) {
        float *own_p = p + i * s.columns, *own_ds = ds + i * s.columns;
        hide_unseen(h, own_p, t + i, t + count - 1);
        differentiate_weights(h, g, t + i, seen, own_p, own_ds);
        for (int64_t j = seen; j < columns; j++) own_p[j] = own_ds[j] = 0;
      }
      weigh_seen(h, ds, s.columns, count, t, h.key(h.prompt), h.key(h.own), h.a.k_row, g.q + h.result(t), row);
    }
    const float *p = s.weights.get(), *ds = s.slopes.get(), *of_output = g.of_output + h.result(first);
    int64_t queries = last - first;
    sum_over_queries(h, p, s.columns, of_output, row, queries, h.prompt.length, g.v + h.gradient(h.prompt));
    sum_over_queries(h, p + h.before(), s.columns, of_output, row, queries, last, g.v + h.gradient(h.own));
    sum_over_queries(h, ds, s.columns, h.query(first), h.a.q_row, queries, h.prompt.length, g.k + h.gradient(h.prompt));
    sum_over_queries(h, ds + h.before(), s.columns, h.query(first), h.a.q_row, queries, last, g.k + h.gradient(h.own));
  }
}

// Call `run` for each segment and query head; one thread runs all of a group's segments for a key head, in order.
template <class F> static void each_head(const Attention& a, bool backward, int threads, F run) {
  int64_t columns = 0;
  for (int64_t g = 0; g < a.groups; g++)
    for (int64_t n = a.bounds[g]; n < a.bounds[g + 1]; n++)
      columns = std::max(columns, padded(a.segments[a.bounds[g]].length, WIDTH) + padded(a.segments[n].length, WIDTH));
#pragma omp parallel num_threads(threads)
  {
    Scratch s;
    s.columns = columns;
    s.weights.reset(new float[columns * (backward ? BLOCK : TALL)]);
    if (backward) s.slopes.reset(new float[columns * BLOCK]);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < a.groups * a.kv_heads; item++) {
      int64_t first = a.bounds[item / a.kv_heads], end = a.bounds[item / a.kv_heads + 1], repeats = a.heads / a.kv_heads;
      for (int64_t n = first; n < end; n++) {
        Head h{a, n == first ? Segment{0, 0} : a.segments[first], a.segments[n], item % a.kv_heads, 0};
        s.own_keys.pack(h.key(h.own), a.k_row, h.own.length, a.dim);
        if (backward) s.own_values.pack(h.value(h.own), a.v_row, h.own.length, a.dim);
        for (h.head = h.kv_head * repeats; h.head < (h.kv_head + 1) * repeats; h.head++) run(h, s);
        if (n == first) std::swap(s.prompt_keys, s.own_keys), std::swap(s.prompt_values, s.own_values);
      }
    }
  }
}

// ---- RMSNorm, SwiGLU and GELU, for rows with a multiple of WIDTH numbers
constexpr int64_t ROWS = 128;  // rows per partial sum of a weight's gradient

// d x = r (w d y - x r^2 mean(w d y x)) with r = 1 / sqrt(mean(x^2) + epsilon); d w += r x d y.
static void norm_backward(const float* x, const float* w, const float* dy, float r, int64_t H, float* dx, float* dw) {
  auto product = [](auto a, auto b, auto c) __attribute__((always_inline)) { return a * b * c; };
  float common = total(H, product, w, dy, x) / H * r * r;
  for (int64_t i = 0; i < H; i += WIDTH) {
    store(dx + i, r * (load(w + i) * load(dy + i) - common * load(x + i)));
    store(dw + i, load(dw + i) + r * load(x + i) * load(dy + i));
  }
}

extern "C" {
// Adds to output [S, heads, dim], which must be zeros. Writes log sum exp of each query's scores, [S, heads].
void attention(const Attention* a, float* output, float* log_sums, int64_t threads) {
  each_head(*a, false, (int)threads, [&](const Head& h, Scratch& s) { attend(h, s, output, log_sums); });
}

// Adds to the gradients [S, heads, dim] and [S, kv_heads, dim].
void attention_backward(const Attention* a, const Gradients* g, int64_t threads) {
  each_head(*a, true, (int)threads, [&](const Head& h, Scratch& s) { attend_backward(h, s, *g); });
}

void rms_norm(const float* x, const float* w, int64_t S, int64_t H, float epsilon, float* y, float* r, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads)
  for (int64_t s = 0; s < S; s++) {
    float squares = total(H, [](auto v) __attribute__((always_inline)) { return v * v; }, x + s * H);
    r[s] = 1.f / std::sqrt(squares / H + epsilon);
    for (int64_t i = 0; i < H; i += WIDTH) store(y + s * H + i, load(w + i) * (load(x + s * H + i) * r[s]));
  }
}

// `partial` has a row of zeros for every ROWS rows of x; their sum becomes the gradient of w.
void rms_norm_backward(const float* x, const float* w, const float* r, const float* dy, int64_t S, int64_t H, float* dx,
                       float* partial, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads)
  for (int64_t block = 0; block < (S + ROWS - 1) / ROWS; block++)
    for (int64_t s = block * ROWS; s < std::min(S, (block + 1) * ROWS); s++)
      norm_backward(x + s * H, w, dy + s * H, r[s], H, dx + s * H, partial + block * H);
}

// SwiGLU, x sigmoid(x) up; if `up` is null, GELU by tanh, which is x sigmoid(c (x + a x^3))
void activation(const float* x, const float* up, int64_t count, float* y, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads)
  for (int64_t i = 0; i < count; i += WIDTH) {
    Vec v = load(x + i);
    store(y + i, up ? v * sigmoid(v) * load(up + i) : gelu(v));
  }
}

void activation_backward(const float* x, const float* up, const float* dy, int64_t count, float* dx, float* dup,
                         int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads)
  for (int64_t i = 0; i < count; i += WIDTH) {
    Vec v = load(x + i), d = load(dy + i), exponent = up ? v : gelu_exponent(v);
    Vec s = sigmoid(exponent), rest = s * exponential(-exponent);  // 1 - s, without the cancellation of a subtraction
    Vec slope = up ? fill(1.f) : GELU_FACTOR * (1.f + 3 * GELU_CUBE * v * v);
    if (up) store(dup + i, d * v * s);
    store(dx + i, (up ? d * load(up + i) : d) * (s + s * rest * v * slope));
  }
}

int64_t norm_rows() { return ROWS; }
}
