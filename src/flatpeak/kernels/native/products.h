// Products of small matrices, used by all kernels: they hold sums in registers and read rows in order.
#pragma once
#include "vectors.h"

constexpr int TALL = 6;  // rows in a tile of registers

struct Ahead { const float* next; int64_t step; };  // memory to prefetch during a sum, `step` floats per term

// acc[m][t] += sum over k < K of a[m][k] b[k][t]; the other arguments are the strides of rows, terms and vectors.
template <class V, int M, int T>
INLINE void accumulate(V (&acc)[M][T], const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step,
                       int64_t b_vector, int64_t K, Ahead ahead = {}) {
  const float* rows[M];
  for (int m = 0; m < M; m++) rows[m] = a + m * a_row;
  for (int64_t k = 0; k < K; k++) {
    if (ahead.step) __builtin_prefetch(ahead.next + k * ahead.step, 0, 2);
    V terms[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) terms[t] = load<V>(b + k * b_step + t * b_vector);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      V scalar = rows[m][k * a_step] - V{};
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) acc[m][t] += scalar * terms[t];
    }
  }
}

// scores = scale Q K^T for up to Most rows of queries, with keys in blocks [columns / WIDTH][D][WIDTH]
template <int Most>
INLINE void score(int count, const float* queries, int64_t query_row, const float* keys, int64_t columns, int64_t D,
                  float scale, float* scores, int64_t score_row) {
  with_count<Most>(count, [&](auto rows) __attribute__((always_inline)) {
    constexpr int Q = decltype(rows)::value;
    int64_t at = 0;
    auto blocks = [&](auto T) __attribute__((always_inline)) {
      Vec acc[Q][T.value] = {};
      accumulate(acc, queries, query_row, 1, keys + at * D, WIDTH, D * WIDTH, D);
      for (int i = 0; i < Q; i++)
        for (int t = 0; t < T.value; t++) store(scores + i * score_row + at + WIDTH * t, acc[i][t] * scale);
      at += T.value * WIDTH;
    };
    while (at < columns) with_count<TILE>((int)std::min<int64_t>(TILE, (columns - at) / WIDTH), blocks);
  });
}

// out += W V for up to Most rows of weights, with values in rows of `width` floats, a multiple of half a vector
template <int Most>
INLINE void weigh(int count, const float* weights, int64_t weight_row, int64_t step, const float* values, int64_t stride,
                  int64_t columns, int64_t width, float* out, int64_t out_row) {
  with_count<Most>(count, [&](auto rows) __attribute__((always_inline)) {
    constexpr int Q = decltype(rows)::value;
    int64_t e = 0;
    auto slice = [&](auto zero, auto T) __attribute__((always_inline)) {
      using V = decltype(zero);
      constexpr int64_t lanes = sizeof(V) / sizeof(float);
      V acc[Q][T.value] = {};
      accumulate(acc, weights, weight_row, step, values + e, stride, lanes, columns);
      for (int i = 0; i < Q; i++)
        for (int t = 0; t < T.value; t++) {
          float* to = out + i * out_row + e + lanes * t;
          store(to, load<V>(to) + acc[i][t]);
        }
      e += lanes * T.value;
    };
    auto whole = [&](auto T) __attribute__((always_inline)) { slice(Vec{}, T); };
    while (width - e >= WIDTH) with_count<TILE>((int)std::min<int64_t>(TILE, (width - e) / WIDTH), whole);
    if (e < width) slice(Half{}, std::integral_constant<int, 1>{});
  });
}
