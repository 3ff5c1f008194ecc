// Arithmetic and conversions of float and both half types for the CUDA kernels, with the same bits as in NumPy, including
// subnormals.
//
// Conversions are written in integer arithmetic. They round to nearest, ties to even; a NaN keeps its sign and the upper bits
// of its payload and becomes quiet. Only which NaN an addition or multiplication gives is unspecified.
//
// CuPy compiles everything with -ftz=true, which flushes subnormal floats to zero in every operation whose PTX instruction the
// compiler chooses. So float arithmetic is written here as PTX instructions without .ftz, and comparisons compare bits.
//
// The same source compiles as C++ for the host, where tests run it. Only the qualifiers, the indices, the barrier and the PTX
// are specific to CUDA.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct half_bits { u16 bits; };      // IEEE 754 binary16
struct bfloat16_bits { u16 bits; };  // the upper half of a float

__device__ inline u32 bits_of(float value) { union { float f; u32 u; } both; both.f = value; return both.u; }
__device__ inline float float_of(u32 bits) { union { float f; u32 u; } both; both.u = bits; return both.f; }

#ifdef __CUDA_ARCH__
#define BINARY(name, ptx, sign) \
  __device__ inline float name(float a, float b) { float c; asm(ptx " %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
__device__ inline int rounded(float value) { int to; asm("cvt.rni.s32.f32 %0, %1;" : "=r"(to) : "f"(value)); return to; }
#else
#define BINARY(name, ptx, sign) inline float name(float a, float b) { return a sign b; }
inline int rounded(float value) { return (int)rintf(value); }
#endif
BINARY(plus, "add.rn.f32", +)
BINARY(times, "mul.rn.f32", *)
BINARY(over, "div.rn.f32", /)

__device__ inline float widen(float value) { return value; }

__device__ inline float widen(bfloat16_bits value) { return float_of((u32)value.bits << 16); }

__device__ inline float widen(half_bits value) {
  u32 sign = (u32)(value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
  if (rest >= 0x7c00u) {  // infinity, or NaN, which becomes quiet
    u32 quiet = rest > 0x7c00u ? 0x400000u : 0u;
    return float_of(sign | 0x7f800000u | (rest & 0x3ffu) << 13 | quiet);
  }
  if (rest >= 0x400u) return float_of(sign | (rest + (112u << 10)) << 13);
  // Zero and subnormals are multiples of 2^-24, which a float represents exactly.
  return float_of(sign | bits_of(times((float)rest, 5.9604644775390625e-8f)));
}

__device__ inline void narrow(float value, float *out) { *out = value; }

__device__ inline void narrow(float value, bfloat16_bits *out) {
  u32 bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) out->bits = (u16)(bits >> 16 | 0x40u);
  else out->bits = (u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

__device__ inline void narrow(float value, half_bits *out) {
  u32 bits = bits_of(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) {  // NaN
    out->bits = (u16)(sign | 0x7e00u | (rest >> 13 & 0x1ffu));
  } else if (rest >= 0x477ff000u) {  // magnitudes from 65520 round to infinity
    out->bits = (u16)(sign | 0x7c00u);
  } else if (rest >= 0x38800000u) {  // normal: the carry rounds to nearest, ties to even
    u32 shifted = rest - (112u << 23);
    out->bits = (u16)(sign | (shifted + 0xfffu + (shifted >> 13 & 1u)) >> 13);
  } else {  // subnormal: adding 0.5 makes the float adder round off the excess bits
    out->bits = (u16)(sign | (bits_of(plus(float_of(rest), 0.5f)) - 0x3f000000u));
  }
}

