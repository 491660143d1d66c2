// Products of small matrices by a warp on tensor cores, and the loads that fit them. Registers hold pairs of 16-bit
// elements; with g = lane / 4 and t = lane % 4:
//   A, 16 x 16:  a[0] row g, columns 2t, 2t + 1;  a[1] row g + 8;  a[2] row g, columns 2t + 8, 2t + 9;  a[3] row g + 8
//   B, 16 x 8:   b[0] column g, rows 2t, 2t + 1;  b[1] column g, rows 2t + 8, 2t + 9
//   D, 16 x 8:   d[0], d[1] row g, columns 2t, 2t + 1;  d[2], d[3] row g + 8
#pragma once

#include "device.h"

namespace yoso {

__device__ __forceinline__ int warp_lane() { return threadIdx.x % kWarp; }

// d += a b; T is BFloat16 or Half.
template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, BFloat16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads four 8 x 8 matrices of 16-bit elements from shared memory: lane l gives row l % 8 of matrix l / 8, 16 bytes
// that are aligned to 16. fragment[i] becomes row g, columns 2t, 2t + 1 of matrix i, or of its transpose.
template <bool transpose>
__device__ __forceinline__ void load_matrices(uint32_t (&fragment)[4], uint32_t address) {
  if constexpr (transpose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address));
}
template <bool transpose>
__device__ __forceinline__ void load_matrices(uint32_t (&fragment)[4], const void* row) {
  load_matrices<transpose>(fragment, static_cast<uint32_t>(__cvta_generic_to_shared(row)));
}

// Two numbers as a pair of T, the first in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, BFloat16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// The two numbers of a pair. Not by T, two of which nvcc takes apart and puts together again wherever the pair is used.
template <class T>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  float2 numbers;
  if constexpr (std::is_same_v<T, BFloat16>)
    numbers = {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
  else
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(numbers.x), "=f"(numbers.y)
        : "r"(pair));
  return numbers;
}

}  // namespace yoso
