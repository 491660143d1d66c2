// The functions of CUDA's runtime that the objects call which nvcc compiles: launches run translated kernels.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <map>
#include <string>
#include <utility>

#include "threads.h"

namespace emulator {
namespace {

// what a kernel may use that does not ask for more
constexpr size_t kDefaultSharedBytes = size_t{48} << 10;

std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> all;
  return all;
}

struct Launchable {
  std::string name;
  size_t max_shared_bytes = kDefaultSharedBytes;
};
// by the functions that stand for kernels in the program
std::map<const void*, Launchable>& launchables() {
  static std::map<const void*, Launchable> all;
  return all;
}

// that of the devices which YOSO_EMULATOR_ARCH names, by the architecture's number
size_t shared_bytes_of_device() {
  return size_t{YOSO_EMULATOR_ARCH == 90 ? 227 : YOSO_EMULATOR_ARCH == 80 ? 163 : 99} << 10;
}

// that of an H200, or as YOSO_EMULATOR_CACHE says, in bytes
int cache_bytes_of_device() {
  const char* variable = std::getenv("YOSO_EMULATOR_CACHE");
  return variable == nullptr ? 50 << 20 : std::atoi(variable);
}

const Watcher* chosen_watcher() {
  const char* variable = std::getenv("YOSO_EMULATOR_WATCH");
  const std::string name = variable == nullptr ? "" : variable;
  if (name.empty()) return nullptr;
  if (name != "races" && name != "traffic") fail("YOSO_EMULATOR_WATCH must be races or traffic");
  return name == "races" ? &races : &traffic;
}

}  // namespace

bool add_kernel(Kernel kernel) {
  const std::string name = kernel.name;
  return kernels().emplace(name, std::move(kernel)).second;
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  launchables()[function] = {name};
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

// What kernel<<<>>>() would call.
void __cudaPopCallConfiguration() { fail("a launch that is not cudaLaunchKernelEx"); }
void __cudaLaunchKernel() { fail("a launch that is not cudaLaunchKernelEx"); }
void __cudaGetKernel() { fail("a launch that is not cudaLaunchKernelEx"); }

const char* cudaGetErrorString(cudaError_t) { return "no error"; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 4; break;
    case cudaDevAttrL2CacheSize:
      *value = cache_bytes_of_device();
      break;
    case cudaDevAttrComputeCapabilityMajor: *value = YOSO_EMULATOR_ARCH / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = YOSO_EMULATOR_ARCH % 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(shared_bytes_of_device()); break;
    default: return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaErrorInvalidValue;
  launchables().at(function).max_shared_bytes = value;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  const Launchable& launchable = launchables().at(function);
  const Kernel& kernel = kernels().at(launchable.name);
  grid_size = {config->gridDim.x, config->gridDim.y, config->gridDim.z};
  block_size = {config->blockDim.x, config->blockDim.y, config->blockDim.z};
  if (config->dynamicSmemBytes > launchable.max_shared_bytes) fail("more shared memory than the kernel asked for");
  if (config->dynamicSmemBytes > shared_bytes_of_device()) fail("more shared memory than a block may have");
  if (uint64_t{block_size.x} * block_size.y * block_size.z > kernel.max_threads)
    fail("more threads than the kernel's launch bounds");
  if (grid_size.y > 65535 || grid_size.z > 65535) fail("more blocks than a dimension may have");
  alignas(16) unsigned char parameters[4096];
  for (size_t i = 0; i < kernel.parameters.size(); ++i)
    std::memcpy(parameters + kernel.parameters[i].offset, arguments[i], kernel.parameters[i].bytes);
  block.body = [&] { kernel.function(parameters); };
  block.kernel = &kernel;
  ++block.launch;
  block.early = config->numAttrs > 0;
  if (!block.early) block.first_running = block.launch;
  watcher = chosen_watcher();
  counts_stretches = watcher != nullptr && watcher->on_block_end != nullptr;
  run_blocks(config->dynamicSmemBytes);
  return cudaSuccess;
}

}  // extern "C"
