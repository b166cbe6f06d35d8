// Vectors as wide as the target instruction set, by the vector types of GCC and clang. Wider vectors would be split on
// the stack: 16 floats on AVX2 took thirty times as long.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#if defined(__AVX512F__)
constexpr int WIDTH = 16, TILE = 4;  // floats per vector, vectors per row of a register tile
#elif defined(__AVX2__)
constexpr int WIDTH = 8, TILE = 2;
#else
constexpr int WIDTH = 4, TILE = 4;
#endif
constexpr int PANEL = WIDTH * TILE;  // columns per panel of a packed weight

typedef float Vec __attribute__((vector_size(4 * WIDTH)));
typedef float Half __attribute__((vector_size(2 * WIDTH)));  // for rows with an odd number of half vectors
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
struct Floats {  // uninitialized memory
  std::unique_ptr<float[]> memory;
  explicit Floats(int64_t count) : memory(new float[count]) {}
  operator float*() const { return memory.get(); }
};
#define INLINE static inline __attribute__((always_inline))

template <class V = Vec> INLINE V load(const float* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V> INLINE void store(float* p, V v) { memcpy(p, &v, sizeof v); }
INLINE Vec fill(float a) { return a - Vec{}; }  // not 0 + a, which turns -0 into 0
INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }
INLINE int64_t padded(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <class F> INLINE float fold(Vec a, F f) {  // folds halves in a fixed order
  float part[WIDTH];
  memcpy(part, &a, sizeof part);
  for (int s = WIDTH / 2; s; s >>= 1)
    for (int i = 0; i < s; i++) part[i] = f(part[i], part[i + s]);
  return part[0];
}
INLINE float sum(Vec a) { return fold(a, [](float x, float y) { return x + y; }); }
template <class F, class... Pointers> INLINE float total(int64_t n, F f, Pointers... x) {  // sum of f(x[i] ...)
  Vec partial{};
  int64_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) partial += f(load(x + i)...);
  float all = sum(partial);
  for (; i < n; i++) all += f(x[i]...);
  return all;
}
INLINE float largest(Vec a) { return fold(a, [](float x, float y) { return x > y ? x : y; }); }

INLINE Ints lanes() {  // 0, 1, 2, ...
  Ints lane;
  for (int i = 0; i < WIDTH; i++) lane[i] = i;
  return lane;
}

// exp to about 1 ulp: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (coefficients: Cephes, expf); 0 below -87.3.
INLINE Vec exponential(Vec given) {
  const Vec magic = fill(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  Vec x = larger(given, fill(-87.3f));
  x = x < fill(88.f) ? x : fill(88.f);
  Vec n = x * 1.44269504089f + magic;
  Ints power = ((Ints)n - 0x4B400000 + 127) << 23;
  n -= magic;
  Vec r = x - n * 0.693145751953125f;
  r -= n * 1.42860682030941723212e-6f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  Vec result = given < fill(-87.3f) ? Vec{} : p * (Vec)power;
  return given == given ? result : given;  // keep NaN
}

struct Softmax { float largest, total; };
// Replaces each of n numbers (a multiple of WIDTH) by exp(factor (x[j] - largest)); returns the maximum and the sum.
INLINE Softmax exponentials(float* x, int64_t n, float factor) {
  Vec best = load(x), total{};
  for (int64_t j = WIDTH; j < n; j += WIDTH) best = larger(best, load(x + j));
  best = fill(largest(best));
  for (int64_t j = 0; j < n; j += WIDTH) {
    Vec e = exponential((load(x + j) - best) * factor);
    total += e;
    store(x + j, e);
  }
  return {best[0], sum(total)};
}

INLINE Vec sigmoid(Vec x) { return x < fill(-87.3f) ? Vec{} : 1.f / (1.f + exponential(-x)); }

constexpr float GELU_FACTOR = 1.5957691216f, GELU_CUBE = 0.044715f;  // 2 sqrt(2 / pi): GELU is x sigmoid(exponent)
INLINE Vec gelu_exponent(Vec x) { return GELU_FACTOR * (x + GELU_CUBE * x * x * x); }
INLINE Vec gelu(Vec x) { return x * sigmoid(gelu_exponent(x)); }

// f(std::integral_constant<int, n>) for n in 1 ... Most, so that the compiler can unroll loops over n.
template <int Most, class F> INLINE void with_count(int n, F f) {
  if constexpr (Most > 1) {
    if (n < Most) return with_count<Most - 1>(n, f);
  }
  f(std::integral_constant<int, Most>{});
}
