// What the emulator has once: the shared memory of the block that runs, and the switch between threads.
#define YOSO_EMULATOR_MAIN
#include "cuda_runtime.h"

namespace yoso {
alignas(16) unsigned char shared_memory_bytes[emulator::kSharedBytes + emulator::kCanaryBytes];
}  // namespace yoso

unsigned char* emulator::shared_memory() { return yoso::shared_memory_bytes; }
