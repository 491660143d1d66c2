// Which instruction set the CPU kernels use. Beside common.h, since module.cpp tells Python.
#pragma once

#include <cstdlib>
#include <string_view>

// tiles of bfloat16, which Linux lets a process use that asks for them
#if defined(__x86_64__) && defined(__linux__)
#define YOSO_HAS_AMX 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define YOSO_HAS_AMX 0
#endif

namespace yoso {

enum class Capability { kPortable, kAvx2, kAvx512, kAmx };
// by torch's names, which knows no fourth
constexpr const char* kCapabilityNames[] = {"default", "avx2", "avx512", "amx"};

#if YOSO_HAS_AMX
// Whether the processor multiplies tiles of bfloat16, and the system saves them for this process.
inline bool may_use_amx() {
  constexpr unsigned kBfloat16 = 1u << 22, kTiles = 1u << 24, kBoth = kBfloat16 | kTiles;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kBoth) != kBoth) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

// The best of the four that the processor has and that ATEN_CPU_CAPABILITY, torch's own setting, allows.
inline Capability cpu_capability() {
  static const Capability capability = [] {
    const char* setting = std::getenv("ATEN_CPU_CAPABILITY");
    const std::string_view limit = setting == nullptr ? "" : setting;
    Capability best = Capability::kPortable;
    if (limit == "default") return best;
#if defined(__x86_64__)
    // whole levels, as the kernels are compiled for: a virtual machine may hide a part of one
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v3")) best = Capability::kAvx2;
    if (limit == "avx2") return best;
    if (__builtin_cpu_supports("x86-64-v4")) best = Capability::kAvx512;
#endif
#if YOSO_HAS_AMX
    if (best == Capability::kAvx512 && limit != "avx512" && may_use_amx()) best = Capability::kAmx;
#endif
    return best;
  }();
  return capability;
}

}  // namespace yoso
