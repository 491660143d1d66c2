// The memory of tensors, so that what reaches past a tensor is found: bytes that nobody may touch lie between them, and
// what has not been written yet is NaN.
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <new>

#include "threads.h"

namespace emulator {
namespace {

constexpr size_t kAlign = 64, kGapBytes = 4096;

std::mutex mutex;
// the bytes of every tensor that lives, by their address
std::map<uintptr_t, size_t>& tensors() {
  static std::map<uintptr_t, size_t> all;
  return all;
}

void release(void* data) {
  if (data == nullptr) return;
  {
    const std::lock_guard lock(mutex);
    tensors().erase(reinterpret_cast<uintptr_t>(data));
  }
  std::free(data);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes > 0) {
      const size_t rounded = (bytes + kGapBytes + kAlign - 1) / kAlign * kAlign;
      data = std::aligned_alloc(kAlign, rounded);
      if (data == nullptr) throw std::bad_alloc();
      std::memset(data, 0xFF, rounded);
      const std::lock_guard lock(mutex);
      tensors()[reinterpret_cast<uintptr_t>(data)] = bytes;
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

const bool installed = [] {
  static Memory memory;
  c10::SetCPUAllocator(&memory, /*priority=*/100);
  return true;
}();

}  // namespace

bool is_in_tensor(const void* address, size_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard lock(mutex);
  const auto next = tensors().upper_bound(begin);
  return next != tensors().begin() && begin + bytes <= std::prev(next)->first + std::prev(next)->second;
}

}  // namespace emulator
