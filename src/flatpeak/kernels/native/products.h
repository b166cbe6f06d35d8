// The products of small matrices that all kernels are made of: sums held in registers, over rows read in order.
#pragma once
#include "vectors.h"

constexpr int TALL = 6;  // rows of a tile of registers

// acc[m][t] += sum over k < K of a[m][k a_step] b[k][t], where b's rows and the vectors in them lie these steps apart.
template <int M, int T>
INLINE void accumulate(Vec (&acc)[M][T], const float* const* a, int64_t a_step, const float* b, int64_t b_step,
                       int64_t b_vector, int64_t K) {
  for (int64_t k = 0; k < K; k++) {
    Vec row[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) row[t] = load(b + k * b_step + t * b_vector);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      Vec scalar = fill(a[m][k * a_step]);
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) acc[m][t] += scalar * row[t];
    }
  }
}

// scores[i] = scale q[i] K^T, of keys in blocks [columns / WIDTH][D][WIDTH]
template <int Q>
INLINE void score(const float* const* q, const float* keys, int64_t columns, int64_t D, float scale, float* const* scores) {
  int64_t at = 0;
  auto blocks = [&](auto T) __attribute__((always_inline)) {
    Vec acc[Q][T.value] = {};
    accumulate(acc, q, 1, keys + at * D, WIDTH, D * WIDTH, D);
    for (int i = 0; i < Q; i++)
      for (int t = 0; t < T.value; t++) store(scores[i] + at + WIDTH * t, acc[i][t] * scale);
    at += T.value * WIDTH;
  };
  while (at < columns) with_count<TILE>((int)std::min<int64_t>(TILE, (columns - at) / WIDTH), blocks);
}

// out[i] += sum over j < columns of weights[i][j step] values[j], of `width` floats, a slice of TILE vectors at a time
template <int Q>
INLINE void weigh(const float* const* weights, int64_t step, const float* values, int64_t stride, int64_t columns,
                  int64_t width, float* const* out) {
  for (int64_t e = 0; e < width; e += PANEL) {
    with_count<TILE>((int)std::min<int64_t>(TILE, (width - e) / WIDTH), [&](auto T) __attribute__((always_inline)) {
      Vec acc[Q][T.value] = {};
      accumulate(acc, weights, step, values + e, stride, WIDTH, columns);
      for (int i = 0; i < Q; i++)
        for (int t = 0; t < T.value; t++) store(out[i] + e + WIDTH * t, load(out[i] + e + WIDTH * t) + acc[i][t]);
    });
  }
}
