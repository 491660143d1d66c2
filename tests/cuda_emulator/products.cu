// Kernels for the emulator's own tests (test_cuda_emulator.py): products of warpgroups, with mistakes to be found,
// groups of copies, and barriers of warpgroups.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kRows = 64, kDepth = 64, kGroups = 2, kThreads = 128 * kGroups;

enum Mistake { kNone, kNoBarrier, kNoProxyFence, kWriteBeforeWait, kNoWait, kNoSwizzle, kTooFewThreads };

#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define REGISTERS_0_15 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_16_31 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_32_47 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_48_63 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d of 64 x 128, with a in shared memory; and of 64 x 32, with a in registers
template <bool transposed_a, bool transposed_b>
__device__ void multiply(float (&d)[64], uint64_t a, uint64_t b, int adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" REGISTERS_0_15 ", " REGISTERS_16_31 ", " REGISTERS_32_47
      ", " REGISTERS_48_63 "}, %64, %65, adds, 1, 1, %67, %68;\n"
      "}"
      : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
      : "l"(a), "l"(b), "r"(adds), "n"(int{transposed_a}), "n"(int{transposed_b}));
}
template <bool transposed_b>
__device__ void multiply(float (&d)[16], const uint32_t (&a)[4], uint64_t b, int adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" REGISTERS_0_15
      "}, {%16, %17, %18, %19}, %20, adds, 1, 1, %22;\n"
      "}"
      : SIXTEEN(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"(int{transposed_b}));
}

__device__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Where an element lies, in bytes, of tiles of 64 x 64, rows of 128 bytes whose 16-byte parts are swizzled.
template <bool transposed>
__device__ int place_of(int row, int k) {
  const int line = transposed ? k : row % 64, byte = 2 * (transposed ? row % 64 : k);
  return row / 64 * 64 * 128 + line * 128 + (byte ^ line % 8 * 16);
}
__device__ uint64_t descriptor_of(uint32_t address, int layout) {
  constexpr uint64_t kTileBytes = 64 * 128, kEightRowsBytes = 8 * 128;
  return uint64_t(layout) << 62 | kEightRowsBytes / 16 << 32 | kTileBytes / 16 << 16 | address / 16;
}

template <bool transposed>
__device__ void fill(unsigned char* to, const uint16_t* from, int rows) {
  for (int i = threadIdx.x; i < rows * kDepth; i += blockDim.x)
    *reinterpret_cast<uint16_t*>(to + place_of<transposed>(i / kDepth, i % kDepth)) = from[i];
}

// out = before + a b^T, where before is given, and for the second warpgroup as much again
template <int columns, bool a_in_registers, bool transposed_a, bool transposed_b>
__global__ void __launch_bounds__(kThreads) products_kernel(float* out, const float* before, const uint16_t* a,
                                                            const uint16_t* b, int mistake) {
  extern __shared__ __align__(1024) unsigned char shared[];
  constexpr int kStepA = transposed_a ? 16 * 128 : 16 * 2, kStepB = transposed_b ? 16 * 128 : 16 * 2;
  unsigned char* const shared_b = shared + kRows * kDepth * 2;
  fill<transposed_a>(shared, a, kRows);
  fill<transposed_b>(shared_b, b, columns);
  if (mistake != kNoProxyFence) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  if (mistake != kNoBarrier) __syncthreads();

  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int row = threadIdx.x % 128 / 32 * 16 + lane / 4, column = lane % 4 * 2;
  const auto at = [&](int i) {
    return (group * kRows + row + i / 2 % 2 * 8) * columns + i / 4 * 8 + column + i % 2;
  };
  float d[columns / 2];
  for (int i = 0; i < columns / 2; ++i) d[i] = before == nullptr ? __int_as_float(0x7FC00000) : before[at(i)];
  const int layout = mistake != kNoSwizzle;
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  for (int step = 0; step < kDepth / 16; ++step) {
    const uint64_t of_b = descriptor_of(address + kRows * kDepth * 2 + step * kStepB, layout);
    if constexpr (a_in_registers) {
      uint32_t of_a[4];
      for (int r = 0; r < 4; ++r) {
        const int k = step * 16 + column + r / 2 * 8;
        of_a[r] = *reinterpret_cast<const uint32_t*>(a + (row + r % 2 * 8) * kDepth + k);
      }
      begin_products();
      multiply<transposed_b>(d, of_a, of_b, before != nullptr || step > 0);
    } else {
      const uint64_t of_a = descriptor_of(address + step * kStepA, layout);
      begin_products();
      multiply<transposed_a, transposed_b>(d, of_a, of_b, before != nullptr || step > 0);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
  if (mistake == kWriteBeforeWait) {
    __syncthreads();
    fill<transposed_b>(shared_b, b, columns);
  }
  if (mistake == kNoWait) return;
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < columns / 2; ++i) out[at(i)] = d[i];
}

// 16 bytes each from four places, of which two have been waited for by the first look at them
__global__ void copies_kernel(float* out, const float* from) {
  extern __shared__ float shared_floats[];
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared_floats));
  for (int i = 0; i < 4; ++i) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address + i * 16), "l"(from + i * 4) : "memory");
    if (i < 3) asm volatile("cp.async.commit_group;" ::: "memory");
  }
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  for (int i = 0; i < 16; ++i) out[i] = shared_floats[i];
  asm volatile("cp.async.wait_all;" ::: "memory");
  for (int i = 0; i < 16; ++i) out[16 + i] = shared_floats[i];
}

// Each warpgroup turns its numbers around; or the block, which the barriers are not for.
__global__ void barriers_kernel(float* out, const float* from, bool of_block, bool waits) {
  extern __shared__ float shared_floats[];
  const int i = threadIdx.x;
  shared_floats[i] = from[i];
  if (waits) asm volatile("bar.sync %0, %1;" ::"r"(1 + i / 128), "n"(128) : "memory");
  out[i] = shared_floats[of_block ? kThreads - 1 - i : i / 128 * 128 + 127 - i % 128];
}

cudaLaunchConfig_t config(unsigned threads, size_t shared_bytes) {
  cudaLaunchConfig_t result = {};
  result.gridDim = 1;
  result.blockDim = threads;
  result.dynamicSmemBytes = shared_bytes;
  return result;
}

template <int columns, bool a_in_registers, bool transposed_a, bool transposed_b>
void launch(float* out, const float* before, const uint16_t* a, const uint16_t* b, int mistake) {
  constexpr int kTileRows = columns < 64 ? 64 : columns;
  const auto launched = config(mistake == kTooFewThreads ? 192 : kThreads, (kRows + kTileRows) * kDepth * 2);
  const auto kernel = products_kernel<columns, a_in_registers, transposed_a, transposed_b>;
  cudaLaunchKernelEx(&launched, kernel, out, before, a, b, mistake);
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void products(float* out, const float* before, const uint16_t* a,
                                                     const uint16_t* b, int which, int mistake) {
  constexpr decltype(&launch<128, false, false, false>) kLaunches[] = {
      launch<128, false, false, false>, launch<128, false, false, true>, launch<128, false, true, false>,
      launch<128, false, true, true>,   launch<32, true, false, false>,  launch<32, true, false, true>};
  kLaunches[which](out, before, a, b, mistake);
}

__attribute__((visibility("default"))) void copies(float* out, const float* from) {
  const auto launched = config(1, 64);
  cudaLaunchKernelEx(&launched, copies_kernel, out, from);
}

__attribute__((visibility("default"))) void barriers(float* out, const float* from, bool of_block, bool waits) {
  const auto launched = config(kThreads, kThreads * sizeof(float));
  cudaLaunchKernelEx(&launched, barriers_kernel, out, from, of_block, waits);
}

}  // extern "C"
