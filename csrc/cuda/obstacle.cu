// Which GPUs there are is asked of NVIDIA's management library: a process in which CUDA has started, as at an import,
// could not fork one that uses it.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <iterator>

#include "../cuda_obstacle.h"

namespace yoso {
namespace {

// by 100, as in sm_80, of which __CUDA_ARCH_LIST__ says 800
constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};

// Code for an architecture runs on later ones of the same generation. That for the newest is there as PTX, too, which
// the driver has to know, where code only has to be of a CUDA with the same first number.
bool runs_on(int architecture, int driver) {
  const auto runs = [&](int compiled) { return compiled / 100 == architecture / 100 && compiled <= architecture; };
  return (driver >= CUDART_VERSION &&
          architecture >= *std::max_element(std::begin(kArchitectures), std::end(kArchitectures))) ||
         std::any_of(std::begin(kArchitectures), std::end(kArchitectures), runs);
}

// The management library's functions that are needed, which all return 0.
class Nvml {
 public:
  Nvml() : library_(dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL)) { starts_ = call("nvmlInit_v2"); }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;
  ~Nvml() {
    if (starts_) call("nvmlShutdown");
    if (library_ != nullptr) dlclose(library_);
  }

  // false where the library, or the function, is not there or fails
  template <class... Arguments>
  bool call(const char* name, Arguments... arguments) const {
    void* const function = library_ == nullptr ? nullptr : dlsym(library_, name);
    return function != nullptr && reinterpret_cast<int (*)(Arguments...)>(function)(arguments...) == 0;
  }
  bool starts() const { return starts_; }

 private:
  void* library_;
  bool starts_ = false;
};

std::string name_of(int architecture) { return "sm_" + std::to_string(architecture / 10); }
std::string version_of(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string find_obstacle() {
  const Nvml nvml;
  int driver = 0;
  unsigned count = 0;
  if (!nvml.starts() || !nvml.call("nvmlDeviceGetCount_v2", &count) || count == 0) return "";
  if (!nvml.call("nvmlSystemGetCudaDriverVersion_v2", &driver)) return "";
  if (driver / 1000 < CUDART_VERSION / 1000)
    return "the driver knows CUDA " + version_of(driver) + ", the kernels were compiled by CUDA " +
           version_of(CUDART_VERSION);
  std::string gpus, compiled;
  for (unsigned i = 0; i < count; ++i) {
    void* gpu = nullptr;
    int major = 0, minor = 0;
    if (!nvml.call("nvmlDeviceGetHandleByIndex_v2", i, &gpu) ||
        !nvml.call("nvmlDeviceGetCudaComputeCapability", gpu, &major, &minor))
      return "";
    const int architecture = 100 * major + 10 * minor;
    if (runs_on(architecture, driver)) return "";
    const std::string name = name_of(architecture);
    if (gpus.find(name) == std::string::npos) gpus += (gpus.empty() ? "" : ", ") + name;
  }
  for (const int architecture : kArchitectures) compiled += (compiled.empty() ? "" : ", ") + name_of(architecture);
  return "this machine has " + gpus + ", the kernels were compiled for " + compiled +
         " and, by drivers of CUDA " + version_of(CUDART_VERSION) + ", later ones";
}

}  // namespace

const std::string& cuda_obstacle() {
  static const std::string obstacle = find_obstacle();
  return obstacle;
}

}  // namespace yoso
