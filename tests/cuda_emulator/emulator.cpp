// What the emulator has once, and what hooks.cpp is not to see: the shared memory of the block that runs, the switch
// between threads, and copies under way.
#define YOSO_EMULATOR_MAIN
#include "cuda_runtime.h"

namespace yoso {
alignas(16) unsigned char shared_memory_bytes[emulator::kSharedBytes + emulator::kCanaryBytes];
}  // namespace yoso

namespace emulator {

unsigned char* shared_memory() { return yoso::shared_memory_bytes; }

bool is_shared(const void* address) {
  return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(shared_memory()) < kSharedBytes;
}

__attribute__((weak)) void on_access(Access, const void*, size_t, const void*) {}

void copy_ahead(void* to, const void* from, bool clear) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
    fail("a copy of 16 bytes that are not aligned");
  on_access(Access::kWriteUntilWaitedFor, to, 16, __builtin_return_address(0));
  block.threads[block.current].copies.push_back({to, clear ? nullptr : from});
}

void finish_copies() {
  std::vector<Copy>& copies = block.threads[block.current].copies;
  for (const Copy& copy : copies) {
    on_access(Access::kWrite, copy.to, 16, __builtin_return_address(0));
    if (copy.from == nullptr) {
      std::memset(copy.to, 0, 16);
    } else {
      on_access(Access::kRead, copy.from, 16, __builtin_return_address(0));
      std::memcpy(copy.to, copy.from, 16);
    }
  }
  copies.clear();
}

}  // namespace emulator
