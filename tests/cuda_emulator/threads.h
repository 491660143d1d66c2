// A block's threads as coroutines on one core: each runs until it waits for others, at a barrier or for the lanes of
// its warp. Shared memory is NaN before a block starts; an address past it, and a barrier that not all reach, end the
// process. YOSO_EMULATOR_ORDER=reverse runs blocks and threads from the last to the first: results that differ are a
// race.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

namespace emulator {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
inline Index thread_index, block_index, block_size, grid_size;

// A function and how it is launched.
struct Kernel {
  struct Parameter {
    size_t offset, bytes;
  };
  const char* name;
  void (*function)(const unsigned char* parameters);
  unsigned max_threads;
  std::vector<Parameter> parameters;
  // the instructions of every stretch of it that a thread goes through from its start to its end
  std::vector<unsigned> stretches;
};
// Makes a kernel known to the launches by its name; returns true.
bool add_kernel(Kernel kernel);

// A barrier of some threads: whoever comes last opens it.
struct Barrier {
  unsigned arrived = 0;
  uint64_t generation = 0;
};

// what the lanes of a warp wait for in __syncwarp; what they do together otherwise has other numbers
constexpr int kWarpBarrier = 0;

struct Warp {
  Barrier barrier;
  // what the waiting lanes wait for, which must be the same; and how often all lanes have met in __syncwarp, which
  // alone orders their accesses to memory
  int operation = kWarpBarrier;
  uint64_t syncs = 0;
  // What each lane shows the others. All lanes take one and the other by turns, as one may be on its way to the next
  // exchange while others read; some of them take the last.
  uint64_t exchanges = 0;
  uint64_t shown[3][32];
};

// four warps, which multiply matrices together
constexpr unsigned kWarpgroup = 128;

// 4 or 16 bytes for shared memory; zeros where there is nothing to read from.
struct Copy {
  unsigned char* to;
  const unsigned char* from;
  unsigned bytes;
  const char* place;
};

// A product of matrices that a warpgroup starts, see tensor_cores.h: descriptors say where they lie in shared memory.
struct Product {
  unsigned columns = 0;
  bool a_in_registers = false, transposed_a = false, transposed_b = false, adds = false;
  uint64_t a = 0, b = 0;
  const char* place = "";

  bool operator==(const Product&) const = default;
};

// What a thread has sent on its way, in groups that it waits for from the oldest on.
template <class T>
struct Groups {
  std::vector<T> open;
  std::vector<std::vector<T>> committed;

  bool empty() const {
    return open.empty() && std::ranges::all_of(committed, [](const auto& group) { return group.empty(); });
  }
  void commit() { committed.push_back(std::exchange(open, {})); }
  // Calls f for what is in all groups but the newest, which then has ended.
  template <class F>
  void finish(size_t newest, const F& f) {
    if (committed.size() <= newest) return;
    const auto end = committed.end() - newest;
    for (auto group = committed.begin(); group != end; ++group)
      for (const T& x : *group) f(x);
    committed.erase(committed.begin(), end);
  }
};

struct Thread {
  void* stack_pointer = nullptr;
  Index index;
  bool done = false;
  // what it waits for, and the generation in which it began to
  const Barrier* barrier = nullptr;
  uint64_t generation = 0;
  // what copies under way will write
  Groups<Copy> copies;
  // the products of its warpgroup
  Groups<Product> products;
  // when it made its writes known to tensor cores: how often all threads had met, and those of its warpgroup
  struct ProxyFence {
    uint64_t barriers, group_syncs;
  };
  std::vector<ProxyFence> proxy_fences;
  // whether it has waited for the launches before its own
  bool launches_before_ended = false;
  // how often it went through each of the kernel's stretches, where that is counted
  std::vector<unsigned> stretch_counts;

  bool waits() const { return barrier != nullptr && barrier->generation == generation; }
};

struct Warpgroup {
  Barrier barrier;
  // what its threads wait for, which must be the same
  int operation = 0;
  Product product;
  // how often they alone have met at a barrier of the block's
  uint64_t syncs = 0;
};

// A barrier of as many threads as wait for each other there.
struct SharedBarrier {
  Barrier barrier;
  unsigned expected = 0;
  // of the first that came, and whether all others are of the same
  unsigned warpgroup = 0;
  bool is_warpgroups = false;
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  Barrier barrier;
  SharedBarrier shared_barriers[16];
  unsigned alive = 0, current = 0;
  // the last barriers to which a thread brought a yes, by turns
  uint64_t yes[2] = {};
  size_t shared_bytes = 0;
  // which one it is of all that ever ran, and of which launch and what
  uint64_t serial = 0, launch = 0;
  const Kernel* kernel = nullptr;
  // whether the launch may start early, and the last one that may not: the first that need not have ended by then
  bool early = false;
  uint64_t first_running = 0;
  std::function<void()> body;
  void* scheduler = nullptr;

  Thread& thread() { return threads[current]; }
};
inline Block block;

// the most that any GPU has for a block, that of sm_90; and bytes behind it that nobody may write
constexpr size_t kMaxSharedBytes = size_t{227} << 10, kCanaryBytes = 4096;
alignas(16) inline unsigned char shared_memory[kMaxSharedBytes + kCanaryBytes];
// Whether an address is of the block's own memory.
inline bool is_shared(const void* address) {
  return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(shared_memory) < kMaxSharedBytes;
}

// Whether an address is of a tensor, see memory.cpp.
bool is_in_tensor(const void* address, size_t bytes);

// What looks at the kernels, if anything does: YOSO_EMULATOR_WATCH chooses races.cpp or traffic.cpp.
// Tensor cores may read from when a product starts until it has been waited for: kReadUntilWaitedFor at both times, by
// every warp, beside the one kRead.
enum class Access { kRead, kWrite, kAdd, kWriteUntilWaitedFor, kReadUntilWaitedFor };
struct Watcher {
  // an access to memory that threads share, by the instruction at a place in the source
  void (*on_access)(Access access, const void* address, size_t bytes, const char* place);
  // what to do when a block has ended, if anything, where stretches are counted
  void (*on_block_end)() = nullptr;
};
extern const Watcher races, traffic;
inline const Watcher* watcher = nullptr;
inline bool counts_stretches = false;
// the running thread's counts, or a place for all that nobody reads
inline unsigned* stretch_counts = nullptr;

// Ends the process.
[[noreturn]] void fail(const char* what, const char* place = "");

// Runs blocks of the kernel, one after the other.
void run_blocks(size_t shared_bytes);

// What one thread does.

void yield();

// Calls opened() when all have come, before any of them goes on.
template <class F>
void wait(Barrier& barrier, unsigned expected, const F& opened) {
  Thread& thread = block.thread();
  thread.barrier = &barrier;
  thread.generation = barrier.generation;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    opened();
  } else {
    yield();
  }
}

void wait_block();
// Waits at one of the block's barriers until so many threads have come.
void wait_at(unsigned barrier, unsigned threads, const char* place);
// Waits for all threads, and returns whether x is true for any.
bool any_of_block(bool x);
inline unsigned lane() { return block.current % 32; }
inline Warp& warp() { return block.warps[block.current / 32]; }
// The lanes of the running thread's warp that have a thread, as bits.
inline uint32_t existing_lanes() {
  const unsigned threads = block_size.x * block_size.y * block_size.z - block.current / 32 * 32;
  return threads < 32 ? (1u << threads) - 1 : ~0u;
}
inline Warpgroup& warpgroup() { return block.warpgroups[block.current / kWarpgroup]; }
// Waits for the lanes of the mask at an operation, a number of its own in the kernel. Before any goes on, the one that
// comes last calls opened().
void wait_warp(uint32_t mask, int operation = kWarpBarrier, void (*opened)() = nullptr);

inline void wait_for_launches_before() { block.thread().launches_before_ended = true; }
// Checks an access to memory, and shows it to the watcher.
void look_at(Access access, const void* address, size_t bytes, const char* place);
// Sends a copy on its way. It is there after finish_copies, and may be earlier.
void copy_ahead(const Copy& copy);
void commit_copies();
// Waits for all copies; or for those in all groups but the newest.
void finish_copies();
void finish_copies(unsigned newest);
void fence_proxy();

}  // namespace emulator
