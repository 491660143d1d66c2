// Shows the kernels' accesses to memory that threads share to emulator::on_access. Compiled with -fsanitize=thread,
// they call the functions below at every access; the compiler's own library for these is not linked.
#include "cuda_runtime.h"

namespace {

using emulator::Access, emulator::block;

// Whether an address is the emulator's own, or a thread's: on its stack.
bool is_private(uintptr_t address) {
  const auto in = [&](const void* begin, size_t bytes) {
    return address - reinterpret_cast<uintptr_t>(begin) < bytes;
  };
  return in(emulator::stacks.data(), emulator::stacks.size()) || in(&block, sizeof(block)) ||
         in(block.threads.data(), block.threads.size() * sizeof(emulator::Thread)) ||
         in(block.warps.data(), block.warps.size() * sizeof(emulator::Warp));
}

void show(Access access, const void* address, size_t bytes, const void* caller) {
  if (block.running && !is_private(reinterpret_cast<uintptr_t>(address)))
    emulator::on_access(access, address, bytes, caller);
}

}  // namespace

#define YOSO_HOOK(name, bytes, access) \
  extern "C" void name(void* address) { show(Access::access, address, bytes, __builtin_return_address(0)); }
#define YOSO_HOOKS(bytes)                                 \
  YOSO_HOOK(__tsan_read##bytes, bytes, kRead)             \
  YOSO_HOOK(__tsan_write##bytes, bytes, kWrite)           \
  YOSO_HOOK(__tsan_unaligned_read##bytes, bytes, kRead)   \
  YOSO_HOOK(__tsan_unaligned_write##bytes, bytes, kWrite)
YOSO_HOOKS(1)
YOSO_HOOKS(2)
YOSO_HOOKS(4)
YOSO_HOOKS(8)
YOSO_HOOKS(16)
extern "C" {
void __tsan_read_range(void* address, size_t bytes) {
  show(Access::kRead, address, bytes, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t bytes) {
  show(Access::kWrite, address, bytes, __builtin_return_address(0));
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
// torch's counts of references
int __tsan_atomic32_fetch_add(volatile int* x, int value, int) {
  return __atomic_fetch_add(x, value, __ATOMIC_SEQ_CST);
}
}
