#include "tensor_cores.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace emulator {
namespace {

constexpr unsigned kRows = 64, kDepth = 16, kMaxColumns = 256;
// of the product of a warp, of whose columns a product of a warpgroup has several times as many
constexpr unsigned kWarpRows = 16, kWarpColumns = 8;
// 16 bytes, which the swizzle of shared memory keeps together
constexpr unsigned kChunk = 8;

// the operands and the sums of the product that a warpgroup is at, for each warpgroup of a block
struct Matrices {
  float a[kRows][kDepth], b[kDepth][kMaxColumns], d[kRows][kMaxColumns];
};
Matrices matrices[1024 / kWarpgroup];
// the same for each warp
struct WarpMatrices {
  float a[kWarpRows][kDepth], b[kDepth][kWarpColumns], d[kWarpRows][kWarpColumns];
};
WarpMatrices warp_matrices[1024 / 32];

float from_bfloat16(uint32_t bits) { return std::bit_cast<float>(bits << 16); }

// A matrix in shared memory, by its descriptor: rows by 16, the latter contiguous, or the former where transposed.
struct Operand {
  uint32_t start, leading_bytes, stride_bytes;
  unsigned rows;
  bool transposed;
  const char* place;

  Operand(uint64_t descriptor, unsigned rows, bool transposed, const char* place)
      : rows(rows), transposed(transposed), place(place) {
    const auto bytes = [&](unsigned bit) { return static_cast<uint32_t>(descriptor >> bit & 0x3FFF) << 4; };
    start = bytes(0), leading_bytes = bytes(16), stride_bytes = bytes(32);
    if (descriptor >> 62 != 1) fail("a matrix whose layout is not the swizzle of 128 bytes", place);
    if ((descriptor >> 49 & 7) != 0) fail("a matrix descriptor with a base offset", place);
    constexpr uint64_t kFields = uint64_t{3} << 62 | uint64_t{0x3FFF} << 32 | 0x3FFF << 16 | 0x3FFF;
    if ((descriptor & ~kFields) != 0) fail("a matrix descriptor with bits outside of its fields", place);
    // only then the swizzle begins anew in each group of eight rows of 128 bytes, and a row is one of them
    if (start % 1024 + 2 * (transposed ? std::min(rows, 64u) : kDepth) > 128)
      fail("a matrix that does not begin in the first of eight rows of 128 bytes, or leaves it", place);
  }

  // Calls f(memory, row, k) for every 8 elements: of row, from column k on, or of column k where transposed.
  template <class F>
  void for_each_chunk(const F& f) const {
    const auto call = [&](uint32_t address, unsigned row, unsigned k) {
      address ^= address >> 3 & 0x70;
      if (address + 16 > block.shared_bytes) fail("an address past the shared memory", place);
      f(shared_memory + address, row, k);
    };
    if (transposed) {
      for (unsigned k = 0; k < kDepth; ++k)
        for (unsigned row = 0; row < rows; row += kChunk)
          call(start + row / 64 * leading_bytes + row % 64 * 2 + k / 8 * stride_bytes + k % 8 * 128, row, k);
    } else {
      for (unsigned row = 0; row < rows; ++row)
        for (unsigned k = 0; k < kDepth; k += kChunk)
          call(start + row / 8 * stride_bytes + row % 8 * 128 + k * 2, row, k);
    }
  }
  // Calls set(row, k, x) for every element.
  template <class F>
  void read(const F& set) const {
    for_each_chunk([&](const unsigned char* memory, unsigned row, unsigned k) {
      look_at(Access::kRead, memory, 16, place);
      uint16_t bits[kChunk];
      std::memcpy(bits, memory, sizeof(bits));
      for (unsigned i = 0; i < kChunk; ++i) set(row + i * transposed, k + i * !transposed, from_bfloat16(bits[i]));
    });
  }
  void look() const {
    for_each_chunk([&](const unsigned char* memory, unsigned, unsigned) {
      look_at(Access::kReadUntilWaitedFor, memory, 16, place);
    });
  }
};

Operand left(const Product& product) { return {product.a, kRows, product.transposed_a, product.place}; }
Operand right(const Product& product) { return {product.b, product.columns, product.transposed_b, product.place}; }

// Each warp may read all of both, from when it starts the product until it has waited for it.
void look_at_operands(const Product& product) {
  if (watcher == nullptr || lane() != 0) return;
  if (!product.a_in_registers) left(product).look();
  right(product).look();
}

// sums = the row times b, plus sums if it adds, as GPUs are known to add: numbers are cut to multiples of one that is
// below the last bit of the largest, and the sum to a float32.
void multiply_row(const float (&row)[kDepth], const float* b, unsigned b_stride, bool adds, float* sums) {
  constexpr int32_t kInfinite = 0x7F800000, kMantissaBits = 23;
  float numbers[kDepth + 1][kWarpColumns];
  for (unsigned k = 0; k < kDepth; ++k)
    for (unsigned j = 0; j < kWarpColumns; ++j) numbers[k][j] = row[k] * b[k * b_stride + j];
  for (unsigned j = 0; j < kWarpColumns; ++j) numbers[kDepth][j] = adds ? sums[j] : 0;
  int32_t largest[kWarpColumns] = {};
  for (const auto& addends : numbers) {
    for (unsigned j = 0; j < kWarpColumns; ++j) {
      const int32_t magnitude = std::bit_cast<int32_t>(addends[j]) & 0x7FFFFFFF;
      largest[j] = magnitude > largest[j] ? magnitude : largest[j];
    }
  }
  // to less than 2^25
  float scales[kWarpColumns];
  for (unsigned j = 0; j < kWarpColumns; ++j) {
    const int32_t exponent = 2 * 127 + 24 - (largest[j] >> kMantissaBits);
    scales[j] = std::bit_cast<float>((exponent < 2 * 127 ? exponent : 2 * 127) << kMantissaBits);
  }
  int32_t parts[kWarpColumns] = {};
  for (const auto& addends : numbers)
    for (unsigned j = 0; j < kWarpColumns; ++j) parts[j] += static_cast<int32_t>(addends[j] * scales[j]);
  for (unsigned j = 0; j < kWarpColumns; ++j) {
    if (largest[j] >= kInfinite) {
      sums[j] = 0;
      for (const auto& addends : numbers) sums[j] += addends[j];
      continue;
    }
    const double exact = double{1} * parts[j] / scales[j];
    const auto nearest = static_cast<float>(exact);
    sums[j] = std::fabs(nearest) > std::fabs(exact) ? std::nextafter(nearest, 0.0f) : nearest;
  }
}

void multiply(const Product& product, Matrices& m) {
  if (!product.a_in_registers) left(product).read([&](unsigned i, unsigned k, float x) { m.a[i][k] = x; });
  right(product).read([&](unsigned j, unsigned k, float x) { m.b[k][j] = x; });
  for (unsigned i = 0; i < kRows; ++i)
    for (unsigned first = 0; first < product.columns; first += kWarpColumns)
      multiply_row(m.a[i], &m.b[0][first], kMaxColumns, product.adds, &m.d[i][first]);
}

void multiply_warp_matrices() {
  WarpMatrices& m = warp_matrices[block.current / 32];
  for (unsigned i = 0; i < kWarpRows; ++i) multiply_row(m.a[i], m.b[0], kWarpColumns, true, m.d[i]);
}

}  // namespace

std::array<float, 4> multiply_in_warp(Format format, const std::array<uint32_t, 4>& a,
                                      const std::array<uint32_t, 2>& b, const std::array<float, 4>& c,
                                      int operation) {
  // Each thread reads and writes its own elements, so that none need wait until others have.
  WarpMatrices& m = warp_matrices[block.current / 32];
  const unsigned row = lane() / 4, pair = lane() % 4 * 2;
  const auto number = [&](uint32_t register_bits, unsigned i) {
    const auto bits = static_cast<uint16_t>(register_bits >> i % 2 * 16);
    return format == Format::bf16 ? from_bfloat16(bits) : static_cast<float>(std::bit_cast<_Float16>(bits));
  };
  const auto result = [&](unsigned i) -> float& { return m.d[row + i / 2 * 8][pair + i % 2]; };
  for (unsigned i = 0; i < 8; ++i) m.a[row + i / 2 % 2 * 8][i / 4 * 8 + pair + i % 2] = number(a[i / 2], i);
  for (unsigned i = 0; i < 4; ++i) m.b[i / 2 * 8 + pair + i % 2][row] = number(b[i / 2], i);
  for (unsigned i = 0; i < 4; ++i) result(i) = c[i];
  wait_warp(~0u, operation, multiply_warp_matrices);
  return {result(0), result(1), result(2), result(3)};
}

void multiply_in_warpgroup(const Product& product, const uint32_t* a, float* d, int operation) {
  const unsigned number = block.current / kWarpgroup, in_group = block.current % kWarpgroup;
  if (block.threads.size() < (number + 1) * kWarpgroup) fail("a warpgroup of less than four warps", product.place);
  Warpgroup& group = warpgroup();
  if (group.barrier.arrived == 0) group.operation = operation, group.product = product;
  if (group.operation != operation || group.product != product)
    fail("threads of a warpgroup that multiply different matrices", product.place);
  block.thread().products.open.push_back(product);
  look_at_operands(product);

  // Each thread reads and writes its own elements, so that none need wait until others have.
  Matrices& m = matrices[number];
  const unsigned row = in_group / 32 * 16 + lane() / 4, column = lane() % 4 * 2;
  const auto element = [&](unsigned i) -> float& { return m.d[row + i / 2 % 2 * 8][i / 4 * 8 + column + i % 2]; };
  for (unsigned i = 0; i < product.columns / 2; ++i) element(i) = d[i];
  if (product.a_in_registers)
    for (unsigned i = 0; i < 8; ++i)
      m.a[row + i / 2 % 2 * 8][i / 4 * 8 + column + i % 2] = from_bfloat16(a[i / 2] >> i % 2 * 16 & 0xFFFF);
  wait(group.barrier, kWarpgroup, [&] { multiply(product, m); });
  for (unsigned i = 0; i < product.columns / 2; ++i) d[i] = element(i);
}

void commit_products() { block.thread().products.commit(); }

void finish_products(unsigned newest) { block.thread().products.finish(newest, look_at_operands); }

}  // namespace emulator
