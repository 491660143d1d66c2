// Which instruction set the CPU kernels use. Beside common.h, since module.cpp tells Python.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace yoso {

enum class Capability { kPortable, kAvx2, kAvx512 };
// by torch's names
constexpr const char* kCapabilityNames[] = {"default", "avx2", "avx512"};

// The best of the three that the processor has and that ATEN_CPU_CAPABILITY, torch's own setting, allows.
inline Capability cpu_capability() {
  static const Capability capability = [] {
    Capability best = Capability::kPortable;
#if defined(__x86_64__)
    // whole levels, as the kernels are compiled for: a virtual machine may hide a part of one
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v3")) best = Capability::kAvx2;
    if (__builtin_cpu_supports("x86-64-v4")) best = Capability::kAvx512;
#endif
    const char* setting = std::getenv("ATEN_CPU_CAPABILITY");
    const std::string_view limit = setting == nullptr ? "" : setting;
    if (limit == "default") return Capability::kPortable;
    if (limit == "avx2") return std::min(best, Capability::kAvx2);
    return best;
  }();
  return capability;
}

}  // namespace yoso
