// Kernels for gradient buckets on a GPU: pack many arrays into one and unpack them, quantise to int8, sum over peers.
//
// Each has the same bits as its reference in NumPy (testing/gpu/reference.py). numbers.cu has the arithmetic and conversions.
// All are memory-bound: they read and write every element once. The table of the arrays is passed by value, as an argument of
// the launch, so that nothing has to be copied to the device first.

// A thread block processes CHUNK elements at a time, and each of its threads BATCH of them. A thread reads all of these before
// it writes the first, so that enough loads are in flight to saturate the memory. Neighbouring threads access neighbouring
// elements, so accesses coalesce wherever an array begins.

#define CHUNK 2048
#define BATCH 8

// Calls write(i, read(i)) for all i in [0, count), with the threads of one block.
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

// Calls chunk(first, n) for every chunk of n elements in [0, count), divided among all blocks.
template <typename Chunk>
__device__ inline void by_all_blocks(i64 count, Chunk chunk) {
  for (i64 first = (i64)blockIdx.x * CHUNK; first < count; first += (i64)gridDim.x * CHUNK)
    chunk(first, (int)(count - first < CHUNK ? count - first : CHUNK));
}

// Packing and unpacking. Array t has counts[t] elements, at least one, and begins at element starts[t] of the bucket. Chunks
// are numbered across all arrays; the first of array t is chunks[t]. Values are multiplied by `scale` as floats and rounded
// once.

#define ROWS 120
struct Rows { u64 arrays[ROWS]; i64 starts[ROWS], counts[ROWS], chunks[ROWS]; };

// The number of the array that a chunk belongs to, by binary search.
__device__ inline int row_of(const Rows &rows, int size, i64 chunk) {
  int low = 0, high = size - 1;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (rows.chunks[middle] <= chunk) low = middle;
    else high = middle - 1;
  }
  return low;
}

// A NaN is not multiplied, because processors and GPUs give different NaN.
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

MOVES(f32, float, f32, float)
MOVES(f32, float, f16, half_bits)
MOVES(f32, float, bf16, bfloat16_bits)
MOVES(f16, half_bits, f32, float)
MOVES(f16, half_bits, f16, half_bits)
MOVES(bf16, bfloat16_bits, f32, float)
MOVES(bf16, bfloat16_bits, bf16, bfloat16_bits)

// Quantisation to int8, as with `wire="int8"`: a quantisation block of 256 values shares a scale, which is the largest
// magnitude / 127, clamped so that it is a normal number and 127 times it is finite. If a value is NaN or infinite, the scale
// is NaN and the integers are zero. A thread block has 32 threads, processes one quantisation block at a time and reads it
// once.

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
    u32 peak = 0;  // as unsigned integers, bits are ordered like magnitudes
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
  by_all_blocks(count, [=](i64 first, int n) {  // chunks begin at block boundaries
    by_one_block<float>(
        n, [=](int i) { return times((float)integers[first + i], scales[first / VALUES + i / VALUES]); },
        [=](int i, float value) { values[first + i] = value; });
  });
}

// The left fold of the arrays of all peers in rank order, in float, divided by `divisor` (1 for a sum), rounded once. The first
// PEERS addresses are passed by value, the others in device memory.

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

// Error feedback keeps the part of the values that compression lost: values - delivered, in place of the values. If any of the
// difference is not finite, all of it becomes zero: the first kernel sets a flag, and the second checks it.

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
