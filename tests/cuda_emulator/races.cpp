// Finds accesses to memory that nothing orders: two by different threads of one launch, one of them a write, with no
// barrier between them that both are at; or of two launches, where the later one may start early and has not waited.
// The emulator's own order hides these; a GPU's may not.
//
// Shuffles, votes and matrix products order nothing here: CUDA promises that of __syncwarp and
// __syncthreads only. Two writes race also where both write the same. Additions of integers, which need no order, race
// with all but each other.
//
// What a warpgroup's product reads, its tensor cores read by a way of their own, the async proxy: whoever wrote it
// needs a fence.proxy.async between the write and the barrier.
#include <cstdio>
#include <memory>
#include <unordered_map>

#include "threads.h"

namespace emulator {
namespace {

// bytes that are looked at as one, and that share a page of records
constexpr uintptr_t kGrain = 2, kPage = 4096;

// Who was where.
struct Moment {
  uint64_t launch = 0, serial = 0, barriers = 0, group_syncs = 0, syncs = 0;
  unsigned thread = 0;
  // of the launches, the first that may not have ended
  uint64_t first_running = 0;
  // the fences before it, of the thread's own
  size_t proxy_fences = 0;
  const char* place = "";

  static Moment now(const char* place) {
    const bool alone = !block.early || block.thread().launches_before_ended;
    return {block.launch,
            block.serial,
            block.barrier.generation,
            warpgroup().syncs,
            emulator::warp().syncs,
            block.current,
            alone ? block.launch : block.first_running,
            block.thread().proxy_fences.size(),
            place};
  }
  unsigned warp() const { return thread / 32; }
  unsigned group() const { return thread / kWarpgroup; }
  // whether this, which came before, is ordered before the other
  bool is_before(const Moment& other) const {
    if (launch != other.launch) return launch < other.first_running;
    if (serial != other.serial) return false;
    if (thread == other.thread || barriers < other.barriers) return true;
    if (group() == other.group() && group_syncs < other.group_syncs) return true;
    return warp() == other.warp() && syncs < other.syncs;
  }
  // whether this, a write of the same block, is seen by tensor cores now
  bool is_fenced() const {
    const auto& fences = block.threads[thread].proxy_fences;
    if (fences.size() <= proxy_fences) return false;
    const Thread::ProxyFence& fence = fences[proxy_fences];
    if (thread == block.current || fence.barriers < block.barrier.generation) return true;
    return group() == block.current / kWarpgroup && fence.group_syncs < warpgroup().syncs;
  }
};

// Of accesses that do not race with each other, those that nothing has ordered before the last of them: who else was
// there, apart from it.
struct Accesses {
  Moment last;
  bool other_blocks = false, other_groups = false, other_warps = false, other_lanes = false;

  void note(const Moment& now) {
    if (last.launch != now.launch || (!other_blocks && last.serial == now.serial && last.barriers < now.barriers)) {
      other_blocks = other_groups = other_warps = other_lanes = false;
    } else if (last.serial != now.serial) {
      other_blocks = true;
    } else if (last.group() != now.group()) {
      other_groups = true;
    } else if (last.group_syncs < now.group_syncs) {
      other_warps = other_lanes = false;
    } else if (last.warp() != now.warp()) {
      other_warps = true;
    } else if (last.syncs < now.syncs) {
      other_lanes = false;
    } else if (last.thread != now.thread) {
      other_lanes = true;
    }
    last = now;
  }
  bool are_before(const Moment& now) const {
    if (last.launch != now.launch) return last.launch < now.first_running;
    if (other_blocks || last.serial != now.serial) return false;
    if (last.barriers < now.barriers) return true;
    if (other_groups || last.group() != now.group()) return false;
    if (last.group_syncs < now.group_syncs) return true;
    if (other_warps || last.warp() != now.warp()) return false;
    return last.syncs < now.syncs || (!other_lanes && last.thread == now.thread);
  }
};

struct Record {
  Moment write;
  Accesses reads, additions;
};

using Page = Record[kPage / kGrain];
std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;

Record& record_of(uintptr_t address) {
  static uintptr_t last_number = ~uintptr_t{0};
  static Record* last = nullptr;
  if (address / kPage != last_number) {
    last_number = address / kPage;
    std::unique_ptr<Page>& page = pages[last_number];
    if (page == nullptr) page.reset(reinterpret_cast<Page*>(new Page{}));
    last = *page;
  }
  return last[address % kPage / kGrain];
}

[[noreturn]] void report(const char* what, const char* after, const Moment& before, const char* place) {
  std::fprintf(stderr, "CUDA emulator: %s after %s, before at %s by thread %u\n", what, after, before.place,
               before.thread);
  fail("a race", place);
}

void on_access(Access access, const void* address, size_t bytes, const char* place) {
  const bool by_tensor_cores = access == Access::kReadUntilWaitedFor;
  const bool reads = access == Access::kRead || by_tensor_cores, adds = access == Access::kAdd;
  const char* const what = reads ? "read" : adds ? "addition" : "write";
  const Moment now = Moment::now(place);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
  for (uintptr_t grain = begin / kGrain; grain * kGrain < begin + bytes; ++grain) {
    Record& record = record_of(grain * kGrain);
    // another block's shared memory is not this one's
    if (is_shared(address))
      for (Moment* before : {&record.write, &record.reads.last, &record.additions.last})
        if (before->serial != now.serial) *before = {};
    if (!record.write.is_before(now)) report(what, "write", record.write, place);
    if (by_tensor_cores && record.write.serial == now.serial && !record.write.is_fenced())
      report("read by tensor cores without fence.proxy.async", "write", record.write, place);
    if (!adds && !record.additions.are_before(now)) report(what, "addition", record.additions.last, place);
    if (!reads && !record.reads.are_before(now)) report(what, "read", record.reads.last, place);
    if (reads) {
      record.reads.note(now);
    } else if (adds) {
      record.additions.note(now);
    } else {
      record.write = now;
    }
  }
}

}  // namespace

constexpr Watcher races = {on_access};

}  // namespace emulator
