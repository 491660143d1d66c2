// Counts the bytes that every kernel moves: of global memory, those that its blocks ask the second-level cache for, if
// the first-level cache keeps what a block has read, and those that they write; and those of the blocks' own memory.
#include <dlfcn.h>

#include <map>
#include <unordered_set>

#include "cuda_runtime.h"

namespace {

using emulator::Access;

// that the caches exchange
constexpr uintptr_t kSectorBytes = 32;

struct Traffic {
  uint64_t read = 0, written = 0, added = 0, shared = 0;
};
std::map<const void*, Traffic> traffic_of;

}  // namespace

void emulator::on_access(Access access, const void* address, size_t bytes, const void*) {
  static uint64_t serial = 0;
  static std::unordered_set<uintptr_t> sectors;
  if (serial != block.serial) {
    serial = block.serial;
    sectors.clear();
  }
  Traffic& traffic = traffic_of[block.kernel];
  if (access == Access::kWriteUntilWaitedFor) return;
  if (is_shared(address)) {
    traffic.shared += bytes;
  } else if (access == Access::kWrite) {
    traffic.written += bytes;
  } else if (access == Access::kAdd) {
    traffic.added += bytes;
  } else {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
    for (uintptr_t sector = begin / kSectorBytes; sector * kSectorBytes < begin + bytes; ++sector)
      if (sectors.insert(sector).second) traffic.read += kSectorBytes;
  }
}

// Writes a line for every kernel that has run, and forgets them: its address in the library, then the bytes.
extern "C" __attribute__((visibility("default"))) void yoso_emulator_write_traffic(const char* path) {
  std::FILE* file = std::fopen(path, "w");
  for (const auto& [kernel, traffic] : traffic_of) {
    Dl_info library = {};
    dladdr(kernel, &library);
    std::fprintf(file, "%zx %zu %zu %zu %zu\n",
                 static_cast<size_t>(static_cast<const char*>(kernel) - static_cast<const char*>(library.dli_fbase)),
                 traffic.read, traffic.written, traffic.added, traffic.shared);
  }
  std::fclose(file);
  traffic_of.clear();
}
