#include "threads.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>

// Saves the registers that a call preserves on the stack, and takes up another stack.
extern "C" void yoso_emulator_switch(void** save, void* load);
asm(R"(
.text
.globl yoso_emulator_switch
yoso_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emulator {
namespace {

// not a power of two: the tops of all threads' stacks would be in one set of the caches
constexpr size_t kStackBytes = (size_t{256} << 10) + 17 * 64;
constexpr unsigned char kPoison = 0xFF;
std::vector<unsigned char> stacks;

bool is_private(const void* address) {
  return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(stacks.data()) < stacks.size();
}

void thread_main() {
  block.body();
  if (!block.thread().copies.empty()) fail("copies that nobody waited for");
  if (!block.thread().products.empty()) fail("products of a warpgroup that nobody waited for");
  // a launch ends after those before it
  if (block.early && !block.thread().launches_before_ended) fail("an end without waiting for the launches before");
  block.thread().done = true;
  --block.alive;
  // threads that ended do not hold up the others
  if (block.alive > 0 && block.barrier.arrived == block.alive) {
    block.barrier.arrived = 0;
    ++block.barrier.generation;
  }
  yield();
  fail("a thread that ended was woken");
}

bool is_reverse() {
  const char* order = std::getenv("YOSO_EMULATOR_ORDER");
  return order != nullptr && std::strcmp(order, "reverse") == 0;
}
const bool reverse = is_reverse();

// where threads count that nobody asks
std::vector<unsigned> unread_counts;

// Goes on with a thread. The caller's stack is kept in `save`: whoever takes it up again returns from here.
void resume(unsigned i, void** save) {
  Thread& thread = block.threads[i];
  block.current = i;
  stretch_counts = (counts_stretches ? thread.stretch_counts : unread_counts).data();
  thread_index = thread.index;
  yoso_emulator_switch(save, thread.stack_pointer);
}

unsigned lanes_of(unsigned warp) { return std::min<unsigned>(block.threads.size() - 32 * warp, 32); }
// Lanes take turns, from the first to the last or the other way, and round again. The first that can go on of those
// that have their turn from a number on, if any can.
std::optional<unsigned> next_of_warp(unsigned warp, unsigned turn) {
  const unsigned lanes = lanes_of(warp);
  for (unsigned step = 0; step < lanes; ++step, ++turn) {
    if (turn >= lanes) turn = 0;
    const unsigned i = 32 * warp + (reverse ? lanes - 1 - turn : turn);
    if (!block.threads[i].done && !block.threads[i].waits()) return i;
  }
  return std::nullopt;
}

void run_block() {
  const unsigned count = block_size.x * block_size.y * block_size.z;
  block.threads.assign(count, {});
  unread_counts.resize(std::max(unread_counts.size(), block.kernel->stretches.size()));
  if (counts_stretches)
    for (Thread& thread : block.threads) thread.stretch_counts.resize(block.kernel->stretches.size());
  block.warps.assign((count + 31) / 32, {});
  block.warpgroups.assign((count + kWarpgroup - 1) / kWarpgroup, {});
  block.barrier = {};
  std::fill(std::begin(block.shared_barriers), std::end(block.shared_barriers), SharedBarrier{});
  std::fill(std::begin(block.yes), std::end(block.yes), 0);
  block.alive = count;
  ++block.serial;
  if (stacks.size() < count * kStackBytes) stacks.resize(count * kStackBytes);
  for (unsigned i = 0; i < count; ++i) {
    // the function that is returned to, below an address of its own; the stack is aligned as after a call
    const uintptr_t last = reinterpret_cast<uintptr_t>(&stacks[(i + 1) * kStackBytes - 1]) & ~uintptr_t{63};
    auto* top = reinterpret_cast<void**>(last - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(&thread_main);
    block.threads[i].stack_pointer = top - 6;
    block.threads[i].index = {i % block_size.x, i / block_size.x % block_size.y, i / (block_size.x * block_size.y)};
  }
  std::memset(shared_memory, kPoison, block.shared_bytes + kCanaryBytes);
  while (block.alive > 0) {
    bool ran = false;
    for (size_t step = 0; step < block.warps.size(); ++step) {
      // a warp goes on for as long as it waits for its own lanes only, while the caches have what is theirs
      const unsigned warp = reverse ? block.warps.size() - 1 - step : step;
      const std::optional<unsigned> first = next_of_warp(warp, 0);
      if (!first) continue;
      resume(*first, &block.scheduler);
      ran = true;
    }
    if (!ran) fail("a barrier that not all threads reach");
  }
  for (size_t i = 0; i < kCanaryBytes; ++i)
    if (shared_memory[block.shared_bytes + i] != kPoison) fail("a write past the shared memory");
  if (counts_stretches) watcher->on_block_end();
}

}  // namespace

void fail(const char* what, const char* place) {
  std::fprintf(stderr, "CUDA emulator: %s %s (block %u %u %u, thread %u %u %u)\n", place, what, block_index.x,
               block_index.y, block_index.z, thread_index.x, thread_index.y, thread_index.z);
  std::abort();
}

void run_blocks(size_t shared_bytes) {
  block.shared_bytes = shared_bytes;
  const uint64_t blocks = uint64_t{grid_size.x} * grid_size.y * grid_size.z;
  for (uint64_t step = 0; step < blocks; ++step) {
    const uint64_t i = reverse ? blocks - 1 - step : step;
    block_index = {static_cast<unsigned>(i % grid_size.x), static_cast<unsigned>(i / grid_size.x % grid_size.y),
                   static_cast<unsigned>(i / grid_size.x / grid_size.y)};
    run_block();
  }
}

void yield() {
  void** const save = &block.thread().stack_pointer;
  const unsigned warp = block.current / 32, turn = reverse ? lanes_of(warp) - 1 - lane() : lane();
  const std::optional<unsigned> next = next_of_warp(warp, turn + 1);
  if (next) {
    resume(*next, save);
  } else {
    yoso_emulator_switch(save, block.scheduler);
  }
}

void wait_block() {
  wait(block.barrier, block.alive, [] {});
}

void wait_at(unsigned barrier, unsigned threads, const char* place) {
  if (barrier >= std::size(block.shared_barriers)) fail("a barrier that blocks do not have", place);
  if (threads == 0 || threads % 32 != 0 || threads > block.threads.size()) fail("a barrier of parts of warps", place);
  SharedBarrier& shared = block.shared_barriers[barrier];
  const unsigned group = block.current / kWarpgroup;
  if (shared.barrier.arrived == 0) shared = {shared.barrier, threads, group, threads == kWarpgroup};
  if (shared.expected != threads) fail("a barrier at which threads wait for different numbers of others", place);
  shared.is_warpgroups &= shared.warpgroup == group;
  if (watcher == &races && !shared.is_warpgroups) fail("a barrier of others than one warpgroup, unknown here", place);
  wait(shared.barrier, threads, [&] { warpgroup().syncs += shared.is_warpgroups; });
}

bool any_of_block(bool x) {
  const uint64_t opened = block.barrier.generation + 1;
  if (x) block.yes[opened % 2] = opened;
  wait_block();
  return block.yes[opened % 2] == opened;
}

void wait_warp(uint32_t mask, int operation, void (*opened)()) {
  if ((mask >> lane() & 1) == 0) fail("a thread that is not in the mask");
  if (warp().barrier.arrived == 0) warp().operation = operation;
  if (warp().operation != operation) fail("lanes of a warp that wait for different operations");
  const uint32_t existing = existing_lanes();
  wait(warp().barrier, std::popcount(mask & existing), [&] {
    if (opened != nullptr) opened();
    if ((mask & existing) != existing) return;
    ++(operation == kWarpBarrier ? warp().syncs : warp().exchanges);
  });
}

void look_at(Access access, const void* address, size_t bytes, const char* place) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) fail("an address that is not aligned", place);
  if (is_shared(address) && static_cast<const unsigned char*>(address) + bytes > shared_memory + block.shared_bytes)
    fail("an address past the shared memory", place);
  if (watcher == nullptr || is_private(address)) return;
  if (!is_shared(address) && !is_in_tensor(address, bytes)) fail("an address outside of all tensors", place);
  watcher->on_access(access, address, bytes, place);
}

void copy_ahead(const Copy& copy) {
  if (reinterpret_cast<uintptr_t>(copy.from) % copy.bytes != 0) fail("an address that is not aligned", copy.place);
  block.thread().copies.open.push_back(copy);
}

void commit_copies() { block.thread().copies.commit(); }

void finish_copies() {
  commit_copies();
  finish_copies(0);
}

void finish_copies(unsigned newest) {
  block.thread().copies.finish(newest, [](const Copy& copy) {
    look_at(Access::kWrite, copy.to, copy.bytes, copy.place);
    if (copy.from == nullptr) {
      std::memset(copy.to, 0, copy.bytes);
    } else {
      look_at(Access::kRead, copy.from, copy.bytes, copy.place);
      std::memcpy(copy.to, copy.from, copy.bytes);
    }
  });
}

void fence_proxy() { block.thread().proxy_fences.push_back({block.barrier.generation, warpgroup().syncs}); }

}  // namespace emulator
