// The part of CUDA's runtime that csrc/cuda uses, on the CPU, so that the kernels can be tested where there is no GPU.
// Blocks run one after the other, a block's threads as coroutines on one core: each runs until it waits for others.
// Shared memory is NaN before a block starts; writing past it, and a barrier that not all reach, ends the process.
// YOSO_EMULATOR_ORDER=reverse runs blocks and threads from the last to the first: results that differ are a race.
// hooks.cpp, where it is linked, shows every access to memory to races.cpp or traffic.cpp.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define YOSO_CUDA_EMULATOR
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr size_t kStackBytes = size_t{256} << 10, kCanaryBytes = 4096;
// what the smallest of the GPUs that kernels are built for have, sm_86 and sm_89
constexpr size_t kSharedBytes = size_t{99} << 10;
constexpr unsigned char kPoison = 0xFF;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "CUDA emulator: %s (block %u %u %u, thread %u %u %u)\n", what, blockIdx.x, blockIdx.y,
               blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
  std::abort();
}

// A barrier of some threads: whoever comes last opens it.
struct Barrier {
  unsigned arrived = 0;
  uint64_t generation = 0;
};

struct Warp {
  Barrier barrier;
  // what the waiting lanes wait for, which must be the same; and how often all lanes have met in __syncwarp, which
  // alone orders their accesses to memory
  const void* operation = nullptr;
  uint64_t syncs = 0;
  // what each lane shows the others
  alignas(64) unsigned char slots[32][64];
};

// 16 bytes for shared memory; zeros where there is nothing to read from.
struct Copy {
  void* to;
  const void* from;
};

struct Thread {
  void* stack_pointer = nullptr;
  bool done = false;
  // what it waits for, and the generation in which it began to
  const Barrier* barrier = nullptr;
  uint64_t generation = 0;
  // what copies under way will write
  std::vector<Copy> copies;
  // whether it has waited for the launches before its own
  bool launches_before_ended = false;

  bool waits() const { return barrier != nullptr && barrier->generation == generation; }
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barrier;
  unsigned alive = 0, current = 0;
  // whether anything happened since the scheduler last looked, and whether a thread runs
  bool progress = false, running = false;
  // which one it is of all that ever ran, and of which launch and what
  uint64_t serial = 0, launch = 0;
  const void* kernel = nullptr;
  // whether the launch may start early, and the last one that may not: the first that need not have ended by then
  bool early = false;
  uint64_t first_running = 0;
  std::function<void()> body;
  void* scheduler = nullptr;
};
inline Block block;
inline std::vector<unsigned char> stacks;
// What is told of every access to memory that threads share: races.cpp or traffic.cpp has it, or nobody asks.
enum class Access { kRead, kWrite, kAdd, kWriteUntilWaitedFor };
void on_access(Access access, const void* address, size_t bytes, const void* caller);
// Whether an address is of the block's own memory.
bool is_shared(const void* address);

// Saves the registers that a call preserves on the stack, and takes up another stack.
extern "C" void yoso_emulator_switch(void** save, void* load);
#ifdef YOSO_EMULATOR_MAIN
asm(R"(
.text
.globl yoso_emulator_switch
yoso_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#endif

inline void yield() {
  yoso_emulator_switch(&block.threads[block.current].stack_pointer, block.scheduler);
}

// Calls opened() when all have come, before any of them goes on.
template <class F>
void wait(Barrier& barrier, unsigned expected, const F& opened) {
  Thread& thread = block.threads[block.current];
  thread.barrier = &barrier;
  thread.generation = barrier.generation;
  block.progress = true;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    opened();
  } else {
    yield();
  }
}

// Sends 16 bytes, or zeros, on their way to shared memory. They are there after finish_copies, and may be earlier.
void copy_ahead(void* to, const void* from, bool clear);
void finish_copies();

inline unsigned lane() { return block.current % 32; }
inline Warp& warp() { return block.warps[block.current / 32]; }

// Waits for the lanes of the mask at an operation; null stands for __syncwarp.
inline void wait_warp(uint32_t mask, const void* operation = nullptr) {
  if ((mask >> lane() & 1) == 0) fail("a thread that is not in the mask");
  if (warp().barrier.arrived == 0) warp().operation = operation;
  if (warp().operation != operation) fail("lanes of a warp that wait for different operations");
  const unsigned warp_threads = std::min<size_t>(32, block.threads.size() - block.current / 32 * 32);
  const uint32_t existing = warp_threads == 32 ? ~0u : (1u << warp_threads) - 1;
  wait(warp().barrier, std::popcount(mask & existing), [&] {
    if (operation == nullptr && (mask & existing) == existing) ++warp().syncs;
  });
}

// Shows value to the lanes of the mask and gives f(), which may read theirs by peer<T>(lane).
template <class T>
const T& peer(unsigned lane) {
  return *reinterpret_cast<const T*>(warp().slots[lane]);
}
template <class T, class F>
auto exchange(uint32_t mask, const T& value, const F& f) {
  static_assert(sizeof(T) <= 64);
  // its address tells the operations of one type from those of another
  static const char operation = 0;
  std::memcpy(warp().slots[lane()], &value, sizeof(T));
  wait_warp(mask, &operation);
  const auto result = f();
  wait_warp(mask, &operation);
  return result;
}

inline void wait_for_launches_before() { block.threads[block.current].launches_before_ended = true; }
inline void check_launches_before_ended() {
  if (block.early && !block.threads[block.current].launches_before_ended)
    fail("an addition, or an end, without waiting for the launches before");
}

inline void thread_main() {
  block.body();
  if (!block.threads[block.current].copies.empty()) fail("copies that nobody waited for");
  check_launches_before_ended();
  Thread& thread = block.threads[block.current];
  thread.done = true;
  block.progress = true;
  --block.alive;
  // threads that ended do not hold up the others
  if (block.alive > 0 && block.barrier.arrived == block.alive) {
    block.barrier.arrived = 0;
    ++block.barrier.generation;
  }
  yield();
  fail("a thread that ended was woken");
}

inline bool reverse() {
  const char* order = std::getenv("YOSO_EMULATOR_ORDER");
  return order != nullptr && std::strcmp(order, "reverse") == 0;
}

unsigned char* shared_memory();

inline void run_block(size_t shared_bytes) {
  const unsigned count = blockDim.x * blockDim.y * blockDim.z;
  block.threads.assign(count, {});
  block.warps.assign((count + 31) / 32, {});
  block.barrier = {};
  block.alive = count;
  ++block.serial;
  if (stacks.size() < count * kStackBytes) stacks.resize(count * kStackBytes);
  for (unsigned i = 0; i < count; ++i) {
    // the function that is returned to, below an address of its own; the stack is aligned as after a call
    auto* top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(&stacks[(i + 1) * kStackBytes - 1]) & ~uintptr_t{63}) - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(&thread_main);
    block.threads[i].stack_pointer = top - 6;
  }
  std::memset(shared_memory(), kPoison, shared_bytes + kCanaryBytes);
  while (block.alive > 0) {
    block.progress = false;
    for (unsigned step = 0; step < count; ++step) {
      const unsigned i = reverse() ? count - 1 - step : step;
      if (block.threads[i].done || block.threads[i].waits()) continue;
      block.current = i;
      threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
      block.running = true;
      yoso_emulator_switch(&block.scheduler, block.threads[i].stack_pointer);
      block.running = false;
    }
    if (!block.progress) fail("a barrier that not all threads reach");
  }
  for (size_t i = 0; i < kCanaryBytes; ++i)
    if (shared_memory()[shared_bytes + i] != kPoison) fail("a write past the shared memory");
}

}  // namespace emulator

inline void __syncthreads() {
  emulator::wait(emulator::block.barrier, emulator::block.alive, [] {});
}
inline void __syncwarp(uint32_t mask = ~0u) { emulator::wait_warp(mask); }

template <class T>
T __shfl_sync(uint32_t mask, T value, int source, int width = 32) {
  const int lane = emulator::lane();
  return emulator::exchange(mask, value, [=] { return emulator::peer<T>(lane / width * width + source % width); });
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int other, int width = 32) {
  const int lane = emulator::lane();
  const int source = (lane ^ other) / width == lane / width ? lane ^ other : lane;
  return emulator::exchange(mask, value, [=] { return emulator::peer<T>(source); });
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32) {
  const int lane = emulator::lane();
  const int source = lane % width >= static_cast<int>(delta) ? lane - delta : lane;
  return emulator::exchange(mask, value, [=] { return emulator::peer<T>(source); });
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
  return emulator::exchange(mask, predicate, [=] {
    uint32_t result = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
      if ((mask >> lane & 1) && emulator::peer<int>(lane) != 0) result |= 1u << lane;
    return result;
  });
}
template <class T>
uint32_t __match_any_sync(uint32_t mask, T value) {
  return emulator::exchange(mask, value, [=] {
    uint32_t result = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
      if ((mask >> lane & 1) && emulator::peer<T>(lane) == value) result |= 1u << lane;
    return result;
  });
}

using std::max;
using std::min;
inline int __popc(uint32_t x) { return std::popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<uint32_t>(x)); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
template <class T>
T __ldg(const T* x) {
  return *x;
}
template <class T>
__attribute__((noinline, no_sanitize("thread"))) T atomicAdd(T* x, T value) {
  emulator::check_launches_before_ended();
  emulator::on_access(emulator::Access::kAdd, x, sizeof(T), __builtin_return_address(0));
  const T old = *x;
  *x = old + value;
  return old;
}

// The runtime's functions.
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrComputeCapabilityMajor
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount      ? 4
           : attribute == cudaDevAttrComputeCapabilityMajor ? 9
                                                            : static_cast<int>(emulator::kSharedBytes);
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  if (config->dynamicSmemBytes > emulator::kSharedBytes) emulator::fail("more shared memory than a block may have");
  if (blockDim.x * blockDim.y * blockDim.z > 1024) emulator::fail("more threads than a block may have");
  if (gridDim.y > 65535 || gridDim.z > 65535) emulator::fail("more blocks than a dimension may have");
  emulator::block.body = [&] { kernel(static_cast<Parameters>(arguments)...); };
  ++emulator::block.launch;
  emulator::block.early = config->numAttrs > 0;
  if (!emulator::block.early) emulator::block.first_running = emulator::block.launch;
  emulator::block.kernel = reinterpret_cast<const void*>(kernel);
  const uint64_t blocks = uint64_t{gridDim.x} * gridDim.y * gridDim.z;
  for (uint64_t step = 0; step < blocks; ++step) {
    const uint64_t i = emulator::reverse() ? blocks - 1 - step : step;
    blockIdx = {static_cast<unsigned>(i % gridDim.x), static_cast<unsigned>(i / gridDim.x % gridDim.y),
                static_cast<unsigned>(i / gridDim.x / gridDim.y)};
    emulator::run_block(config->dynamicSmemBytes);
  }
  return cudaSuccess;
}
