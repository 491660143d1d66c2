// The form in which rows are multiplied, and copies of those that do not have it: against products of many rows these
// cost nothing.
#pragma once

#include "rows.h"

namespace yoso {

constexpr int kMaxMmaColumns = 128;
// whether rows are multiplied on tensor cores
template <class In>
constexpr bool kIsForTensorCores = sizeof(In) == 2;
// 16-bit elements in 16 bytes
constexpr int kPiece = 8;

// Rows as the kernels that multiply them take them: those of 16 bits as tensor cores do, of at most kMaxMmaColumns
// columns in pieces of 16 bytes, or wider ones as float32. `widest` has the columns of query, key and value at most.
inline Tensor tile_rows(const Tensor& x, int64_t widest) {
  const bool is_16_bit = x.scalar_type() == ScalarType::BFloat16 || x.scalar_type() == ScalarType::Half;
  if (!is_16_bit) return dense_rows(x);
  if (widest > kMaxMmaColumns) return dense_rows(torch::stable::to(x, ScalarType::Float));
  if ((x.size(3) <= 1 || x.stride(3) == 1) && aligned(rows_of<Half>(x), x.size(3))) return x;
  Tensor pieces = empty_heads_last(x, x.size(2), round_up(x.size(3), kPiece));
  torch::stable::zero_(pieces);
  Tensor columns = torch::stable::narrow(pieces, 3, 0, x.size(3));
  torch::stable::copy_(columns, x);
  return pieces;
}

// What the kernels write for `out`, in the form of rows that tile_rows gave: out itself where it has that form.
class TileOutput {
 public:
  TileOutput(const Tensor& out, const Tensor& rows)
      : copies_(out.scalar_type() != rows.scalar_type() || out.size(3) != rows.size(3)),
        out_(out),
        tiles_(copies_ ? empty_heads_last(rows, out.size(2), rows.size(3)) : out) {}

  const Tensor& tiles() const { return tiles_; }
  // to out, what is not there yet
  void copy() {
    if (copies_) torch::stable::copy_(out_, torch::stable::narrow(tiles_, 3, 0, out_.size(3)));
  }

 private:
  bool copies_;
  Tensor out_, tiles_;
};

}  // namespace yoso
