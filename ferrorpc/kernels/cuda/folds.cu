// Reduces the arrays of all ranks, each read from the shared memory of its rank. Element i of the result is the left fold of
// element i of every array, in rank order; half types are accumulated in float and rounded once. The array of rank r begins at
// bases[r] + offset. Integers wrap. Max and Min propagate NaN.

template <typename T> struct Wide { typedef T type; static __device__ inline T of(T value) { return value; } };
template <> struct Wide<half_bits> { typedef float type; static __device__ inline float of(half_bits value) { return widen(value); } };
template <> struct Wide<bfloat16_bits> { typedef float type; static __device__ inline float of(bfloat16_bits value) { return widen(value); } };

template <typename T> __device__ inline T add(T a, T b) { return (T)((u64)a + (u64)b); }
template <> __device__ inline float add(float a, float b) { return plus(a, b); }
template <> __device__ inline double add(double a, double b) { return a + b; }
template <typename T> __device__ inline T multiply(T a, T b) { return (T)((u64)a * (u64)b); }
template <> __device__ inline float multiply(float a, float b) { return times(a, b); }
template <> __device__ inline double multiply(double a, double b) { return a * b; }

struct Sum { template <typename T> static __device__ inline T of(T a, T b) { return add(a, b); } };
struct Product { template <typename T> static __device__ inline T of(T a, T b) { return multiply(a, b); } };
// CUDA's own float comparisons would take subnormals for zero, because CuPy compiles with -ftz=true.
template <typename T> __device__ inline bool above(T a, T b) { return a > b; }
template <typename T> __device__ inline bool odd(T a) { return a != a; }
template <> __device__ inline bool odd(float a) { return (bits_of(a) & 0x7fffffffu) > 0x7f800000u; }
#ifdef __CUDA_ARCH__
template <> __device__ inline bool above(float a, float b) {
  int found;
  asm("{ .reg .pred p; setp.gt.f32 p, %1, %2; selp.s32 %0, 1, 0, p; }" : "=r"(found) : "f"(a), "f"(b));
  return found;
}
#endif

struct Max { template <typename T> static __device__ inline T of(T a, T b) { return odd(a) ? a : above(b, a) || odd(b) ? b : a; } };
struct Min { template <typename T> static __device__ inline T of(T a, T b) { return odd(a) ? a : above(a, b) || odd(b) ? b : a; } };

#ifdef __CUDA_ARCH__
__device__ inline float single(double value) { float to; asm("cvt.rn.f32.f64 %0, %1;" : "=f"(to) : "d"(value)); return to; }
#else
inline float single(double value) { return (float)value; }
#endif

template <typename T> __device__ inline T divided(T value, double) { return value; }
template <> __device__ inline float divided(float value, double divisor) {
  return divisor == 1.0 ? value : over(value, single(divisor));
}
template <> __device__ inline double divided(double value, double divisor) { return divisor == 1.0 ? value : value / divisor; }

template <typename T> __device__ inline void store(T value, T *out) { *out = value; }
__device__ inline void store(float value, half_bits *out) { narrow(value, out); }
__device__ inline void store(float value, bfloat16_bits *out) { narrow(value, out); }

template <typename T> struct alignas(16) Pack { T of[16 / sizeof(T)]; };

template <typename Op, typename T>
__device__ inline void fold(const u64 *bases, int size, i64 offset, i64 count, T *out, double divisor) {
  typedef typename Wide<T>::type W;
  const int many = 16 / sizeof(T);
  i64 stride = (i64)gridDim.x * blockDim.x, first = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  i64 packs = ((u64)out | (u64)offset) % 16 ? 0 : count / many;
  for (i64 place = first; place < packs; place += stride) {
    Pack<T> next = ((const Pack<T> *)(bases[0] + offset))[place];
    W total[many];
    for (int i = 0; i < many; ++i) total[i] = Wide<T>::of(next.of[i]);
    for (int peer = 1; peer < size; ++peer) {
      next = ((const Pack<T> *)(bases[peer] + offset))[place];
      for (int i = 0; i < many; ++i) total[i] = Op::of(total[i], Wide<T>::of(next.of[i]));
    }
    for (int i = 0; i < many; ++i) store(divided(total[i], divisor), next.of + i);
    ((Pack<T> *)out)[place] = next;
  }
  for (i64 i = packs * many + first; i < count; i += stride) {
    W total = Wide<T>::of(((const T *)(bases[0] + offset))[i]);
    for (int peer = 1; peer < size; ++peer) total = Op::of(total, Wide<T>::of(((const T *)(bases[peer] + offset))[i]));
    store(divided(total, divisor), out + i);
  }
}

#define FOLD(op_name, Op, name, T)                                                                                       \
  extern "C" __global__ void fold_##op_name##_##name(const u64 *bases, int size, i64 offset, i64 count, T *out, double divisor) { \
    fold<Op>(bases, size, offset, count, out, divisor);                                                                  \
  }

#define FOLDS(name, T)           \
  FOLD(sum, Sum, name, T)        \
  FOLD(product, Product, name, T) \
  FOLD(max, Max, name, T)        \
  FOLD(min, Min, name, T)

FOLDS(int8, signed char)
FOLDS(uint8, u8)
FOLDS(int32, int)
FOLDS(uint32, u32)
FOLDS(int64, i64)
FOLDS(uint64, u64)
FOLDS(float16, half_bits)
FOLDS(float32, float)
FOLDS(float64, double)
FOLDS(bfloat16, bfloat16_bits)
