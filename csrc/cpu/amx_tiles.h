// Tiles of AMX and their products. A tile holds 16 rows of 64 bytes, and a product of two is
//     c[i][j] += sum over k < 32 of a[i][k] b[k][j],  a: 16 rows of 32 numbers, b: 16 rows of 16 pairs of numbers, of
//     row 2k and 2k + 1 of the matrix, c: 16 x 16 in float32.
#pragma once

#include "simd.h"

#if YOSO_HAS_AMX

namespace yoso {
namespace {

constexpr int64_t kAmxRows = 16;
// numbers that a product of two tiles adds up: rows are padded to so many
constexpr int64_t kAmxStep = 32;

inline int64_t amx_padded(int64_t columns) { return (columns + kAmxStep - 1) / kAmxStep * kAmxStep; }

// Calls f(Width<64>), with the eight tiles at their full size.
template <class F>
__attribute__((target("arch=x86-64-v4,amx-tile,amx-bf16"), noinline)) void run_amx(const F& f) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } const configuration;
  asm volatile("ldtilecfg %0" : : "m"(configuration));
  f(Width<64>{});
  asm volatile("tilerelease");
}

template <int tile>
YOSO_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}
template <int tile>
YOSO_INLINE void load_tile(const void* from, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(row_bytes), "i"(tile) : "memory");
}
template <int tile>
YOSO_INLINE void store_tile(void* to, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(row_bytes), "i"(tile) : "memory");
}
template <int c, int a, int b>
YOSO_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

// Where the tiles of a matrix lie: number i of step s, and of part p where the matrix is the sum of two.
template <int parts = 1>
struct TileGrid {
  const void* data;
  int64_t tile_bytes, step_bytes, row_bytes, part_bytes = 0;

  template <int register_number>
  YOSO_INLINE void load(int64_t i, int64_t s, int64_t p) const {
    load_tile<register_number>(static_cast<const char*>(data) + i * tile_bytes + s * step_bytes + p * part_bytes,
                               row_bytes);
  }
};

// R x C tiles of sums are in registers 0..3; 4 and 5 hold a's tiles, 6 and 7 b's.
template <int R, int C>
YOSO_INLINE void clear_sum_tiles() {
  clear_tile<0>();
  if constexpr (C > 1) clear_tile<1>();
  if constexpr (R > 1) clear_tile<2>();
  if constexpr (R > 1 && C > 1) clear_tile<3>();
}
template <int R, int C>
YOSO_INLINE void load_sum_tiles(const float* from, int64_t columns) {
  const int64_t row_bytes = columns * sizeof(float);
  load_tile<0>(from, row_bytes);
  if constexpr (C > 1) load_tile<1>(from + kAmxRows, row_bytes);
  if constexpr (R > 1) load_tile<2>(from + kAmxRows * columns, row_bytes);
  if constexpr (R > 1 && C > 1) load_tile<3>(from + kAmxRows * columns + kAmxRows, row_bytes);
}
template <int R, int C>
YOSO_INLINE void store_sum_tiles(float* to, int64_t columns) {
  const int64_t row_bytes = columns * sizeof(float);
  store_tile<0>(to, row_bytes);
  if constexpr (C > 1) store_tile<1>(to + kAmxRows, row_bytes);
  if constexpr (R > 1) store_tile<2>(to + kAmxRows * columns, row_bytes);
  if constexpr (R > 1 && C > 1) store_tile<3>(to + kAmxRows * columns + kAmxRows, row_bytes);
}

// Adds one step's products of tiles from (i, j) on. What has one part stays for the other's second.
template <int R, int C, int a_parts, int b_parts>
YOSO_INLINE void add_products(int64_t i, int64_t j, int64_t s, int64_t part, const TileGrid<a_parts>& a,
                              const TileGrid<b_parts>& b) {
  if (part < a_parts) a.template load<4>(i, s, part);
  if (part < b_parts) b.template load<6>(j, s, part);
  multiply_tiles<0, 4, 6>();
  if constexpr (C > 1) {
    if (part < b_parts) b.template load<7>(j + 1, s, part);
    multiply_tiles<1, 4, 7>();
  }
  if constexpr (R > 1) {
    if (part < a_parts) a.template load<5>(i + 1, s, part);
    multiply_tiles<2, 5, 6>();
  }
  if constexpr (R > 1 && C > 1) multiply_tiles<3, 5, 7>();
}

template <int R, int C, int a_parts, int b_parts>
YOSO_INLINE void multiply_grid_part(bool add, int64_t i, int64_t j, int64_t steps, const TileGrid<a_parts>& a,
                                    const TileGrid<b_parts>& b, float* c, int64_t c_columns) {
  float* const sums = c + i * kAmxRows * c_columns + j * kAmxRows;
  if (add)
    load_sum_tiles<R, C>(sums, c_columns);
  else
    clear_sum_tiles<R, C>();
  for (int64_t s = 0; s < steps; ++s)
    for (int part = 0; part < std::max(a_parts, b_parts); ++part) add_products<R, C>(i, j, s, part, a, b);
  store_sum_tiles<R, C>(sums, c_columns);
}

// c = a b, or c += a b: rows x columns tiles of sums, of `steps` products each.
template <int a_parts, int b_parts>
YOSO_INLINE void multiply_grids(bool add, int64_t rows, int64_t columns, int64_t steps, const TileGrid<a_parts>& a,
                                const TileGrid<b_parts>& b, float* c, int64_t c_columns) {
  int64_t i = 0;
  for (; i + 2 <= rows; i += 2) {
    int64_t j = 0;
    for (; j + 2 <= columns; j += 2) multiply_grid_part<2, 2>(add, i, j, steps, a, b, c, c_columns);
    if (j < columns) multiply_grid_part<2, 1>(add, i, j, steps, a, b, c, c_columns);
  }
  if (i == rows) return;
  int64_t j = 0;
  for (; j + 2 <= columns; j += 2) multiply_grid_part<1, 2>(add, i, j, steps, a, b, c, c_columns);
  if (j < columns) multiply_grid_part<1, 1>(add, i, j, steps, a, b, c, c_columns);
}

// Products of two rows of a's tiles with b's, two columns of these after the other, in steps: each adds those of one
// multiply_grids step and part, and one more stores the sums, which registers keep from step to step.
template <bool add, int a_parts>
class ProductSteps {
 public:
  ProductSteps() = default;
  ProductSteps(int64_t columns, int64_t steps, const TileGrid<a_parts>& a, const TileGrid<>& b, float* c,
               int64_t c_columns)
      : columns_(columns), steps_(steps * a_parts), a_(a), b_(b), c_(c), c_columns_(c_columns) {}

  // how many steps there are
  YOSO_INLINE int64_t count() const { return (columns_ + 1) / 2 * (steps_ + 1); }
  YOSO_INLINE bool left() const { return column_ < columns_; }

  YOSO_INLINE void next() {
    if (column_ + 1 < columns_)
      next_of<2>();
    else
      next_of<1>();
    if (++step_ > steps_) {
      step_ = 0;
      column_ += 2;
    }
  }

 private:
  template <int C>
  YOSO_INLINE void next_of() {
    float* const sums = c_ + column_ * kAmxRows;
    if (step_ == steps_) return store_sum_tiles<2, C>(sums, c_columns_);
    if (step_ == 0) {
      if constexpr (add)
        load_sum_tiles<2, C>(sums, c_columns_);
      else
        clear_sum_tiles<2, C>();
    }
    add_products<2, C>(0, column_, step_ / a_parts, step_ % a_parts, a_, b_);
  }

  // the column of tiles that is next, and the step
  int64_t columns_ = 0, steps_ = 0, column_ = 0, step_ = 0;
  TileGrid<a_parts> a_{};
  TileGrid<> b_{};
  float* c_ = nullptr;
  int64_t c_columns_ = 0;
};

// What AMX multiplies beside the vectors that weigh a tile, a few steps at each of `calls` calls, since the processor
// looks only some hundred instructions ahead: first a tile's weights with values, then the rows of another.
class ProductsMeanwhile {
 public:
  using Values = ProductSteps<true, 2>;
  using Rows = ProductSteps<false, 1>;

  explicit ProductsMeanwhile(int64_t calls) : calls_(calls) {}

  YOSO_INLINE void set_values(const Values& values) { values_ = values; }
  YOSO_INLINE void set_rows(const Rows& rows) {
    rows_ = rows;
    per_calls_ = values_.count() + rows.count();
    due_ = 0;
  }

  // As many steps as are due.
  YOSO_INLINE void operator()() {
    for (due_ += per_calls_; due_ >= calls_; due_ -= calls_) next();
  }
  // All steps that are left.
  YOSO_INLINE void finish() {
    while (values_.left() || rows_.left()) next();
  }

 private:
  YOSO_INLINE void next() {
    if (values_.left())
      values_.next();
    else if (rows_.left())
      rows_.next();
  }

  const int64_t calls_;
  int64_t per_calls_ = 0, due_ = 0;
  Values values_;
  Rows rows_;
};

}  // namespace
}  // namespace yoso

#endif
