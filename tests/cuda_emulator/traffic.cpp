// Counts the bytes that every kernel moves: of global memory, those that its blocks ask the second-level cache for, if
// the first-level cache keeps what a block has read, and those that they write; and those of the blocks' own memory.
// And the instructions that its warps execute, if their lanes go through the same ones together.
#include <algorithm>
#include <cstdio>
#include <map>
#include <unordered_set>

#include "threads.h"

namespace emulator {
namespace {

// that the caches exchange
constexpr uintptr_t kSectorBytes = 32;

struct Traffic {
  uint64_t read = 0, written = 0, shared = 0, instructions = 0;
};
std::map<const Kernel*, Traffic> traffic_of;

void on_access(Access access, const void* address, size_t bytes, const char*) {
  static uint64_t serial = 0;
  static std::unordered_set<uintptr_t> sectors;
  if (serial != block.serial) {
    serial = block.serial;
    sectors.clear();
  }
  Traffic& traffic = traffic_of[block.kernel];
  if (access == Access::kWriteUntilWaitedFor || access == Access::kReadUntilWaitedFor) return;
  if (is_shared(address)) {
    traffic.shared += bytes;
  } else if (access == Access::kWrite) {
    traffic.written += bytes;
  } else {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
    for (uintptr_t sector = begin / kSectorBytes; sector * kSectorBytes < begin + bytes; ++sector)
      if (sectors.insert(sector).second) traffic.read += kSectorBytes;
  }
}

void on_block_end() {
  const std::vector<unsigned>& stretches = block.kernel->stretches;
  uint64_t& instructions = traffic_of[block.kernel].instructions;
  for (size_t first = 0; first < block.threads.size(); first += 32) {
    const size_t last = std::min(first + 32, block.threads.size());
    for (size_t stretch = 0; stretch < stretches.size(); ++stretch) {
      unsigned most = 0;
      for (size_t i = first; i < last; ++i) most = std::max(most, block.threads[i].stretch_counts[stretch]);
      instructions += uint64_t{most} * stretches[stretch];
    }
  }
}

}  // namespace

constexpr Watcher traffic = {on_access, on_block_end};

}  // namespace emulator

// Writes a line for every kernel that has run, and forgets them: its name, the bytes and the instructions.
extern "C" __attribute__((visibility("default"))) void yoso_emulator_write_traffic(const char* path) {
  std::FILE* file = std::fopen(path, "w");
  for (const auto& [kernel, traffic] : emulator::traffic_of)
    std::fprintf(file, "%s %zu %zu %zu %zu\n", kernel->name, traffic.read, traffic.written, traffic.shared,
                 traffic.instructions);
  std::fclose(file);
  emulator::traffic_of.clear();
}
