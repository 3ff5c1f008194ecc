// Kernels for buckets of gradients on a GPU: many arrays packed into one and back, blocks of int8, sums over peers.
//
// Each has a reference in NumPy (reference.py) and the same bits; what they are made of is in numbers.cu. All are limited by
// memory: they read and write every element once. What says which arrays there are is passed by value, as part of the launch:
// nothing has to be copied before it.

// A block takes CHUNK elements at a time, and each of its threads BATCH of them: all are read before the first is written, so
// that enough is under way to keep the memory busy. Threads side by side have elements side by side, wherever an array begins.

#define CHUNK 2048
#define BATCH 8

// write(i, read(i)) for all i in [0, count), by one block.
template <typename Value, typename Read, typename Write>
__device__ inline void by_one_block(int count, Read read, Write write) {
  int step = blockDim.x;
  for (int base = threadIdx.x; base < count; base += step * BATCH) {
    if (base + step * (BATCH - 1) < count) {
      Value values[BATCH];
#pragma unroll
      for (int k = 0; k < BATCH; ++k) values[k] = read(base + k * step);
#pragma unroll
      for (int k = 0; k < BATCH; ++k) write(base + k * step, values[k]);
    } else {
      for (int i = base; i < count; i += step) write(i, read(i));
    }
  }
}

// chunk(first, n) for [0, count) in chunks of n elements, by all blocks.
template <typename Chunk>
__device__ inline void by_all_blocks(i64 count, Chunk chunk) {
  for (i64 first = (i64)blockIdx.x * CHUNK; first < count; first += (i64)gridDim.x * CHUNK)
    chunk(first, (int)(count - first < CHUNK ? count - first : CHUNK));
}

// Many arrays into one and back. Array t has counts[t] elements, at least one, and lies in the bucket from element starts[t]
// on; its first chunk is number chunks[t] of those of all arrays. Values are multiplied by `scale` as floats, rounded once.

#define ROWS 120
struct Rows { u64 arrays[ROWS]; i64 starts[ROWS], counts[ROWS], chunks[ROWS]; };

// The array that a chunk is of.
__device__ inline int row_of(const Rows &rows, int size, i64 chunk) {
  int low = 0, high = size - 1;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (rows.chunks[middle] <= chunk) low = middle;
    else high = middle - 1;
  }
  return low;
}

// A NaN is not multiplied: processors and GPUs make different ones of it.
__device__ inline float scaled(float value, float scale) {
  u32 bits = bits_of(value);
  return (bits & 0x7fffffffu) > 0x7f800000u ? float_of(bits | 0x400000u) : times(value, scale);
}

template <typename From, typename To>
__device__ inline void move(const From *source, To *target, i64 count, float scale) {
  by_one_block<From>(
      count < CHUNK ? (int)count : CHUNK, [=](int i) { return source[i]; },
      [=](int i, From value) { narrow(scaled(widen(value), scale), target + i); });
}

#define MOVES(from_name, From, to_name, To)                                                                             \
  extern "C" __global__ void pack_##from_name##_##to_name(const __grid_constant__ Rows rows, int size, i64 chunks,      \
                                                          To *bucket, float scale) {                                    \
    for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {                                                  \
      int row = row_of(rows, size, chunk);                                                                              \
      i64 first = (chunk - rows.chunks[row]) * CHUNK;                                                                   \
      move((const From *)rows.arrays[row] + first, bucket + rows.starts[row] + first, rows.counts[row] - first, scale); \
    }                                                                                                                   \
  }                                                                                                                     \
  extern "C" __global__ void unpack_##from_name##_##to_name(const __grid_constant__ Rows rows, int size, i64 chunks,    \
                                                            const From *bucket, float scale) {                          \
    for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {                                                  \
      int row = row_of(rows, size, chunk);                                                                              \
      i64 first = (chunk - rows.chunks[row]) * CHUNK;                                                                   \
      move(bucket + rows.starts[row] + first, (To *)rows.arrays[row] + first, rows.counts[row] - first, scale);         \
    }                                                                                                                   \
  }

#define MOVES_FROM(name, From)      \
  MOVES(name, From, f32, float)     \
  MOVES(name, From, f16, half_bits) \
  MOVES(name, From, bf16, bfloat16_bits)

MOVES_FROM(f32, float)
MOVES_FROM(f16, half_bits)
MOVES_FROM(bf16, bfloat16_bits)

// Blocks of int8, as `wire="int8"` has them: 256 values share a scale, the largest magnitude / 127, kept within floats that can
// be multiplied back. A block with NaN or infinity gets NaN as its scale and zeros. One CUDA block of 32 threads does one of
// ours at a time, and reads it once.

#define VALUES 256
#define LANES 32

extern "C" __global__ void quantise_int8(const float *values, i64 count, float *scales, signed char *integers) {
  __shared__ u32 peaks[LANES];
  i64 blocks = (count + VALUES - 1) / VALUES;
  for (i64 block = blockIdx.x; block < blocks; block += gridDim.x) {
    i64 first = block * VALUES + threadIdx.x;
    float own[VALUES / LANES];
#pragma unroll
    for (int k = 0; k < VALUES / LANES; ++k) own[k] = first + k * LANES < count ? values[first + k * LANES] : 0.0f;
    u32 peak = 0;  // magnitudes have the order of their bits
#pragma unroll
    for (int k = 0; k < VALUES / LANES; ++k) {
      u32 magnitude = bits_of(own[k]) & 0x7fffffffu;
      peak = magnitude > peak ? magnitude : peak;
    }
    peaks[threadIdx.x] = peak;
    __syncthreads();
    for (int lane = 0; lane < LANES; ++lane) peak = peaks[lane] > peak ? peaks[lane] : peak;
    __syncthreads();
    bool damaged = peak >= 0x7f800000u;
    u32 bits = bits_of(over(float_of(peak), 127.0f));
    bits = bits > 0x00800000u ? bits : 0x00800000u;  // 2^-126
    bits = bits < 0x7c010203u ? bits : 0x7c010203u;  // largest that * 127 is finite
    float scale = float_of(bits);
    if (threadIdx.x == 0) scales[block] = damaged ? float_of(0x7fc00000u) : scale;
#pragma unroll
    for (int k = 0; k < VALUES / LANES; ++k)
      if (first + k * LANES < count) integers[first + k * LANES] = damaged ? 0 : (signed char)rounded(over(own[k], scale));
  }
}

extern "C" __global__ void dequantise_int8(const float *scales, const signed char *integers, i64 count, float *values) {
  by_all_blocks(count, [=](i64 first, int n) {  // a chunk begins with a block
    by_one_block<float>(
        n, [=](int i) { return times((float)integers[first + i], scales[first / VALUES + i / VALUES]); },
        [=](int i, float value) { values[first + i] = value; });
  });
}

// The left fold of n peers' arrays in rank order, in float, divided by `divisor` (1 for a sum), rounded once. Addresses beyond
// the first few are in memory.

#define PEERS 64
struct Peers { u64 arrays[PEERS]; };

template <typename T>
__device__ inline void sum(const Peers &peers, const u64 *more, int size, i64 count, T *out, float divisor) {
  by_all_blocks(count, [&](i64 first, int n) {
    int step = blockDim.x;
    for (int base = threadIdx.x; base < n; base += step * BATCH) {
      float totals[BATCH];
      for (int peer = 0; peer < size; ++peer) {
        const T *array = (const T *)(peer < PEERS ? peers.arrays[peer] : more[peer - PEERS]) + first;
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
          float value = base + k * step < n ? widen(array[base + k * step]) : 0.0f;
          totals[k] = peer ? plus(totals[k], value) : value;
        }
      }
#pragma unroll
      for (int k = 0; k < BATCH; ++k)
        if (base + k * step < n)
          narrow(bits_of(divisor) == bits_of(1.0f) ? totals[k] : over(totals[k], divisor), out + first + base + k * step);
    }
  });
}

#define SUM(name, T)                                                                                                     \
  extern "C" __global__ void sum_peers_##name(const __grid_constant__ Peers peers, const u64 *more, int size, i64 count, \
                                              T *out, float divisor) {                                                   \
    sum(peers, more, size, count, out, divisor);                                                                         \
  }

SUM(f32, float)
SUM(f16, half_bits)
SUM(bf16, bfloat16_bits)

// What error feedback keeps of values that were delivered in part: the difference, in place of the values; and nothing at all
// where any of it is not finite, which the first kernel finds and the second does.

extern "C" __global__ void residue(float *values, const float *delivered, i64 count, u32 *damaged) {
  by_all_blocks(count, [=](i64 first, int n) {
    by_one_block<float>(
        n, [=](int i) { return plus(values[first + i], float_of(bits_of(delivered[first + i]) ^ 0x80000000u)); },
        [=](int i, float rest) {
          if ((bits_of(rest) & 0x7f800000u) == 0x7f800000u) *damaged = 1u;
          values[first + i] = rest;
        });
  });
}

extern "C" __global__ void forget(float *values, i64 count, const u32 *damaged) {
  if (!*damaged) return;
  by_all_blocks(count, [=](i64 first, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) values[first + i] = 0.0f;
  });
}
