// What the CUDA kernels share: launching on the caller's stream and device, and small functions of a thread.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include <dlfcn.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "../checks.h"
#include "../cuda_obstacle.h"

// The dispatch key of these kernels. tests/cuda_emulator runs them on a CPU, whose tensors have no stream.
#ifdef YOSO_CUDA_EMULATOR
#define YOSO_CUDA_KEY CPU
#else
#define YOSO_CUDA_KEY CUDA
#endif

namespace yoso {

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = ~0u;
// beyond this, a kernel must ask for its shared memory
constexpr size_t kDefaultSharedBytes = size_t{48} << 10;

// Whether to register kernels: else PyTorch's own operations run in their place.
inline bool may_run_here() {
#ifdef YOSO_CUDA_EMULATOR
  return true;
#else
  return cuda_obstacle().empty();
#endif
}

inline void check_cuda(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

// The device of a tensor, made current as long as this lives, and torch's current stream on it.
class Device {
 public:
  explicit Device(const Tensor& x) {
#ifndef YOSO_CUDA_EMULATOR
    guard_.emplace(x.get_device());
    // torch's runtime and the one linked into this library each remember a device
    check_cuda(cudaSetDevice(x.get_device()), "cudaSetDevice");
    STD_TORCH_CHECK(current_stream()(x.get_device(), &stream_) == 0, "torch gave no CUDA stream");
    device_ = x.get_device();
#endif
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_); }
  int64_t num_multiprocessors() const { return attribute(cudaDevAttrMultiProcessorCount); }
  // what is to stay in the second-level cache from one launch to the next, beside all that passes through
  int64_t cached_bytes() const {
    return std::min<int64_t>(int64_t{attribute(cudaDevAttrL2CacheSize)} / 5 * 4, 32 << 20);
  }
  // the most shared memory that a block may ask for
  size_t shared_bytes() const { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }
  // Whether launches may start early, see launch. Code for older architectures only, which newer GPUs take as PTX, has
  // no instruction to wait with.
  bool starts_early() const { return kNewestArchitecture >= 900 && attribute(cudaDevAttrComputeCapabilityMajor) >= 9; }
  // Whether there are the instructions of wgmma.h, which are those of this GPU alone: setup.py compiles for sm_90 with
  // these.
  bool has_wgmma() const {
    // with it the driver compiles the PTX, which has none of them, although there is code for this GPU
    const char* forced = std::getenv("CUDA_FORCE_PTX_JIT");
    if (forced != nullptr && *forced == '1') return false;
    return kNewestArchitecture >= 900 && attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
           attribute(cudaDevAttrComputeCapabilityMinor) == 0;
  }

 private:
  static constexpr int kNewestArchitecture = std::max({__CUDA_ARCH_LIST__});

  int attribute(cudaDeviceAttr which) const {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, device_), "cudaDeviceGetAttribute");
    return value;
  }

#ifndef YOSO_CUDA_EMULATOR
  using CurrentStream = int32_t (*)(int32_t device, void** stream);
  // From the library that torch has loaded: linking to it would keep this one from loading beside a torch without CUDA.
  static CurrentStream current_stream() {
    static const auto function = [] {
      void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
      return library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    }();
    STD_TORCH_CHECK(function != nullptr, "this torch has no CUDA");
    return reinterpret_cast<CurrentStream>(function);
  }
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
#endif

  int device_ = 0;
  void* stream_ = nullptr;
};

// Runs kernel(arguments...) on `blocks` blocks of `threads` threads; nothing where there are no blocks. With early, the
// kernel may start when all blocks of the launch before it on the stream have called let_next_launch_start: every
// thread of it must call wait_for_launches_before, and touch nothing that these write before it has.
template <bool early = false, class... Parameters, class... Arguments>
void launch(const Device& device, void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes,
            Arguments&&... arguments) {
  if (blocks == 0) return;
  STD_TORCH_CHECK(blocks <= INT32_MAX, "too many blocks for one launch: ", blocks);
  // as much as there is, not what this launch needs: another thread may launch the kernel with more at the same time
  if (shared_bytes > kDefaultSharedBytes)
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(device.shared_bytes())),
               "shared memory");
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = device.stream();
  cudaLaunchAttribute starts_early = {};
  starts_early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  starts_early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &starts_early;
  config.numAttrs = early && device.starts_early() ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(std::forward<Arguments>(arguments))...),
             "launch");
}

// The block's shared memory, whose size the launch gives: the only kind that kernels use.
extern __shared__ __align__(1024) unsigned char shared_memory_bytes[];
template <class T>
__device__ T* shared_memory() {
  return reinterpret_cast<T*>(shared_memory_bytes);
}

constexpr int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }
constexpr int64_t round_up(int64_t x, int64_t y) { return divide_up(x, y) * y; }

// A number that the compiler knows nothing about: it would compute what depends on the number early, and run out of
// registers, or again and again, to save them.
__device__ __forceinline__ uint32_t unknown(uint32_t number) {
  asm volatile("" : "+r"(number));
  return number;
}

template <class T>
__device__ __forceinline__ T* unknown(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// A row of rows that lie row_bytes apart: the address takes one instruction.
template <class T>
__device__ __forceinline__ T* row_at(T* rows, uint32_t row, uint32_t row_bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const unsigned char, unsigned char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(rows) + uint64_t{row} * row_bytes);
}

// Bytes from one row of a [B, H, N, D] tensor of T to the next.
template <class T>
uint32_t row_bytes_of(const Tensor& x) {
  const int64_t bytes = x.size(2) > 1 ? x.stride(2) * static_cast<int64_t>(sizeof(T)) : 0;
  STD_TORCH_CHECK(bytes <= int64_t{UINT32_MAX}, "rows must be less than 4 GiB apart, got ", bytes, " bytes");
  return static_cast<uint32_t>(bytes);
}

// What a kernel counts in 32 bits, with room for its blocks' threads past the last.
inline int32_t count_of(int64_t count, const char* what) {
  STD_TORCH_CHECK(count <= INT32_MAX - (1 << 20), "too many ", what, ": ", count);
  return static_cast<int32_t>(count);
}

// See launch.
__device__ __forceinline__ void let_next_launch_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_launches_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Of kernels that have nothing to do before.
__device__ __forceinline__ void start_after_launches_before() {
  let_next_launch_start();
  wait_for_launches_before();
}

// Copies 4 or 16 bytes to an address of shared memory, or clears these, while the thread goes on.
template <int bytes>
__device__ __forceinline__ void copy_ahead(uint32_t to, const void* from, bool clear) {
  const int read = clear ? 0 : bytes;
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(to), "l"(from), "r"(read) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :
                 : "r"(to), "l"(from), "n"(bytes), "r"(read)
                 : "memory");
}
template <int bytes>
__device__ __forceinline__ void copy_ahead(void* to, const void* from, bool clear) {
  copy_ahead<bytes>(static_cast<uint32_t>(__cvta_generic_to_shared(to)), from, clear);
}

// Waits for the thread's copies.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
// Makes a group of those since the last one, and waits for all groups but the newest.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int newest>
__device__ __forceinline__ void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" : : "n"(newest) : "memory");
}

// Calls f with a value of query's element type; float16 has too few exponents for weights that are not scaled.
template <class F>
void dispatch_wide(const Tensor& query, const F& f) {
  switch (query.scalar_type()) {
    case ScalarType::Float:
      return f(float{});
    case ScalarType::Double:
      return f(double{});
    case ScalarType::BFloat16:
      return f(BFloat16{});
    default:
      STD_TORCH_CHECK(false, "query must be bfloat16, float32 or float64 for the CUDA kernels");
  }
}

}  // namespace yoso
