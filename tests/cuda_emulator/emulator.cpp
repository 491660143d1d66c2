// What the emulator has once, and what races.cpp is not to see: the shared memory of the block that runs, the switch
// between threads, and copies under way.
#define YOSO_EMULATOR_MAIN
#include "cuda_runtime.h"

namespace yoso {
alignas(16) unsigned char shared_memory_bytes[emulator::kSharedBytes + emulator::kCanaryBytes];
}  // namespace yoso

namespace emulator {

unsigned char* shared_memory() { return yoso::shared_memory_bytes; }

// races.cpp has another
__attribute__((weak)) void note_access(const void*, size_t, bool) {}

void copy_ahead(void* to, const void* from, bool clear) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
    fail("a copy of 16 bytes that are not aligned");
  note_access(to, 16, true);
  block.threads[block.current].copies.push_back({to, clear ? nullptr : from});
}

void finish_copies() {
  std::vector<Copy>& copies = block.threads[block.current].copies;
  for (const Copy& copy : copies) {
    note_access(copy.to, 16, true);
    if (copy.from == nullptr) {
      std::memset(copy.to, 0, 16);
    } else {
      note_access(copy.from, 16, false);
      std::memcpy(copy.to, copy.from, 16);
    }
  }
  copies.clear();
}

}  // namespace emulator
