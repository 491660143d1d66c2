// Hash codes of rows by the signs of random projections: by transforms in registers and Gaussian directions here, by
// directions that stand for transforms in hash_wgmma.h.
//
// A code takes a projection's bit from the sign bit of its negative, which is set for positive projections: scales and
// directions are negated in shared memory, and sums that begin at +0 never become -0, so that zero gives 0.
#include "hash.h"
#include "hash_wgmma.h"
#include "mma.h"

namespace yoso {
namespace {

constexpr int kThreads = 128;
// the largest transform
constexpr int kMaxSize = 1024;

// How blocks share out the work: each has a head's tile of rows and a group of hash functions. Heads, whose rows lie
// together in memory, come before tiles.
struct Grid {
  uint32_t heads, tiles, groups;

  struct Place {
    int64_t batch, head, tile, group;
  };
  __device__ Place find() const {
    const uint32_t row_tile = blockIdx.x / groups / heads;
    return {row_tile / tiles, blockIdx.x / groups % heads, row_tile % tiles, blockIdx.x % groups};
  }
};

// Runs a kernel for tiles of `rows` rows and groups of `functions` hash functions.
inline void launch_grid(const Device& device, void (*kernel)(AnyRows, Problem, Grid), int64_t rows, int64_t functions,
                        size_t shared_bytes, const AnyRows& x, const Problem& problem) {
  const int64_t tiles = divide_up(problem.N, rows), groups = divide_up(problem.num_hash, functions);
  const Grid grid = {static_cast<uint32_t>(problem.H), static_cast<uint32_t>(tiles), static_cast<uint32_t>(groups)};
  launch(device, kernel, problem.B * problem.H * tiles * groups, kThreads, shared_bytes, x, problem, grid);
}

// Four neighbours in shared memory, loaded 16 bytes at a time.
template <class T>
struct alignas(16) Four {
  T at[4];
};

template <class T>
__device__ __forceinline__ Four<T> four(const T* from) {
  return *reinterpret_cast<const Four<T>*>(from);
}

// The elements from `first` on of a row of `columns`, zero past its end.
template <int count, class In, class T>
__device__ __forceinline__ void load_part(const In* row, int64_t first, int64_t columns, bool vectors, T* x) {
  constexpr int per_load = 16 / sizeof(In);
  if (vectors) {
#pragma unroll
    for (int i = 0; i < count; i += per_load) {
      In loaded[per_load] = {};
      if (first + i < columns) load(row + first + i, loaded);
      widen(loaded, x + i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] = first + i < columns ? static_cast<T>(row[first + i]) : T{0};
  }
}

// The same of a row of the problem's dtype, float64 for double only.
template <int count, class T>
__device__ __forceinline__ void load_part(const Problem& problem, const unsigned char* row, int64_t first,
                                          int64_t columns, T* x) {
  const auto load_as = [&](auto element) {
    load_part<count>(reinterpret_cast<const decltype(element)*>(row), first, columns, problem.vectors, x);
  };
  if constexpr (std::is_same_v<T, double>)
    load_as(double{});
  else if (problem.dtype == ScalarType::BFloat16)
    load_as(BFloat16{});
  else if (problem.dtype == ScalarType::Half)
    load_as(Half{});
  else
    load_as(float{});
}

// The transform across neighbouring lanes, for each of their R elements.
template <int lanes, int R, class T>
__device__ __forceinline__ void butterfly_lanes(T* x, int lane) {
#pragma unroll
  for (int h = 1; h < lanes; h *= 2) {
    const T sign = (lane & h) ? -1 : 1;
#pragma unroll
    for (int i = 0; i < R; ++i) x[i] = sign * x[i] + __shfl_xor_sync(kAllLanes, x[i], h);
  }
}

// `lanes` neighbouring threads have a row of lanes * E elements: element e of a lane is number lane * E + e. A block
// has kThreads / lanes rows of a head, and of every bit's transforms the one for hash functions group * width onwards.
//
// Of a bit's transform 32 rows are computed at a time: the sum of the row's parts of 32 elements, with signs that
// depend on the part and on which 32 rows these are, is transformed. The lanes share out that sum: each sends one half
// of its elements and keeps the other, then sends a half of that, as often as there are lanes to send to, or until
// four are left. So that the halves to send are the same registers in every lane, a lane has its elements in an order
// of its own: element e ^ swap in place of element e.
template <class T, int E, int lanes>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 2 : 3)
    hash_hadamard_kernel(AnyRows rows, const Problem problem, const Grid grid) {
  constexpr int width = E * lanes, tile_rows = kThreads / lanes;
  // lanes that share out a sum, and the elements that each is left with
  constexpr int sharing = lanes < 8 ? lanes : 8, left = kFunctions / sharing;
  const int lane = threadIdx.x % lanes;
  const int swap = (lane & 1) << 4 | (lane & 2) << 2 | (lane & 4);
  const auto [batch, head, tile, group] = grid.find();
  const int64_t row = tile * tile_rows + threadIdx.x / lanes;
  const bool exists = row < problem.N;

  const int32_t masked = exists ? problem.masked(batch, row) : 0;
  T x[E];
  load_part<E>(problem, rows.at(batch, head, exists ? row : 0), lane * E, exists ? problem.D : 0, x);
  float* parameters = shared_memory<float>();
  const int bits = problem.hash_code_len;
  const float* head_parameters = problem.parameters + head * (2 + bits * int64_t{grid.groups}) * width;
  for (int i = threadIdx.x; i < (2 + bits) * width; i += kThreads) {
    const int block = i / width;
    const int64_t from = block < 2 ? block : 2 + (block - 2) * int64_t{grid.groups} + group;
    const float parameter = head_parameters[from * width + i % width];
    parameters[i] = block < 2 ? parameter : -parameter;
  }
  __syncthreads();

  parameters += lane * E;
#pragma unroll
  for (int round = 0; round < 2; ++round, parameters += width) {
#pragma unroll
    for (int i = 0; i < E; i += 4) {
      const Four<float> signs = four(parameters + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i + j] *= signs.at[j];
    }
    butterfly_lanes<lanes, E>(x, lane);
    // signs before a transform are a change of order after it
    if (lanes > 1 && round == 1)
#pragma unroll
      for (int i = 0; i < E; ++i)
        if (odd(i & swap)) x[i] = -x[i];
    butterfly<E>(x);
  }

  const int64_t first_function = group * width;
  const int count = at_most(problem.num_hash - first_function, width);
  for (int first = 0; first < count; first += kFunctions) {
    // the signs of the sum, by what changes since the last rows
    const int step = first / kFunctions, changed = step == 0 ? 0 : step ^ (step - 1);
    if (changed != 0)
#pragma unroll
      for (int i = 0; i < E; ++i)
        if (odd(changed & (lane * (E / 32) + i / 32))) x[i] = -x[i];
    uint32_t codes[left];
#pragma unroll
    for (int i = 0; i < left; ++i) codes[i] = 0;
#pragma unroll 1
    for (int bit = bits - 1; bit >= 0; --bit) {
      const float* scales = parameters + bit * width;
      T sum[kFunctions];
#pragma unroll
      for (int i = 0; i < E; i += 4) {
        const Four<float> scale = four(scales + i / 32 * 32 + (i % 32 ^ swap));
#pragma unroll
        for (int j = 0; j < 4; ++j)
          sum[i % 32 + j] = (i < 32 ? T{0} : sum[i % 32 + j]) + x[i + j] * static_cast<T>(scale.at[j]);
      }
#pragma unroll
      for (int h = 1; h < sharing; h *= 2)
#pragma unroll
        for (int i = 0; i < kFunctions / 2 / h; ++i)
          sum[i] += __shfl_xor_sync(kAllLanes, sum[i + kFunctions / 2 / h], h);
#pragma unroll
      for (int h = sharing; h < lanes; h *= 2)
#pragma unroll
        for (int i = 0; i < left; ++i) sum[i] += __shfl_xor_sync(kAllLanes, sum[i], h);
      butterfly<left>(sum);
      butterfly_lanes<sharing, left>(sum, lane);
#pragma unroll
      for (int i = 0; i < left; ++i) push_sign(codes[i], sum[i]);
    }
    const int remaining = exists && lane < sharing ? count - first - swap : 0;
    problem.store(batch, head, first_function + first + swap, row, [&](auto* to) {
#pragma unroll
      for (int i = 0; i < left; ++i, to += problem.N)
        if (i < remaining) *to = codes[i] | masked;
    });
  }
}

// Transforms of at least `width` columns.
template <class T, int width>
void launch_hadamard(const Device& device, const AnyRows& rows, const Problem& problem) {
  if constexpr (width < kMaxSize)
    if (problem.size > width) return launch_hadamard<T, 2 * width>(device, rows, problem);
  // as many elements as a thread's registers hold
  constexpr int most = sizeof(T) == 8 ? 32 : 64, E = width < most ? width : most, lanes = width / E;
  launch_grid(device, hash_hadamard_kernel<T, E, lanes>, kThreads / lanes, problem.size,
              (2 + problem.hash_code_len) * width * sizeof(float), rows, problem);
}

// A block multiplies 128 rows with the directions of 32 hash functions, a bit at a time; a thread 8 rows with 4.
constexpr int kTileRows = kThreads, kThreadRows = 8, kThreadFunctions = 4;
// columns of a block's tiles
constexpr int kColumns = 64;
// apart enough that threads which write a column fall into different banks; the same for codes
constexpr int kDirectionStride = kFunctions + 4, kCodeStride = kTileRows + 1;

// Stores the codes of the thread's row from the block's, [functions][kCodeStride].
__device__ __forceinline__ void store_codes(const Problem& problem, const int32_t* tile_codes, int64_t batch,
                                            int64_t head, int64_t first_function, int functions, int64_t row) {
  if (row >= problem.N) return;
  const int32_t masked = problem.masked(batch, row);
  problem.store(batch, head, first_function, row, [&](auto* to) {
    for (int f = 0; f < functions; ++f, to += problem.N) *to = tile_codes[f * kCodeStride + threadIdx.x] | masked;
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 2 : 4)
    hash_gaussian_kernel(AnyRows rows, const Problem problem, const Grid grid) {
  const auto [batch, head, tile, group] = grid.find();
  const int64_t first_function = group * kFunctions;
  const int functions = at_most(problem.num_hash - first_function, kFunctions);
  const int64_t D = problem.D, row = tile * kTileRows + threadIdx.x;
  const bool exists = row < problem.N;
  const unsigned char* from = rows.at(batch, head, exists ? row : 0);

  // [kColumns][kTileRows] and [kColumns][kDirectionStride]
  T *x = shared_memory<T>(), *directions = x + kColumns * kTileRows;
  const int lane = threadIdx.x % kWarp;
  const int thread_row = threadIdx.x / kWarp * kWarp + lane / 8 * kThreadRows;
  const int thread_function = lane % 8 * kThreadFunctions;
  uint32_t codes[kThreadRows][kThreadFunctions];
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r)
#pragma unroll
    for (int f = 0; f < kThreadFunctions; ++f) codes[r][f] = 0;
#pragma unroll 1
  for (int bit = problem.hash_code_len - 1; bit >= 0; --bit) {
    const float* all = problem.parameters +
                       ((head * problem.hash_code_len + bit) * problem.num_hash + first_function) * D;
    T sum[kThreadRows][kThreadFunctions];
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r)
#pragma unroll
      for (int f = 0; f < kThreadFunctions; ++f) sum[r][f] = 0;
#pragma unroll 1
    for (int64_t first = 0; first < D; first += kColumns) {
      __syncthreads();
      // rows of one tile stay for all bits
      if (D > kColumns || bit == problem.hash_code_len - 1) {
        constexpr int part = 16;
#pragma unroll 1
        for (int c = 0; c < kColumns; c += part) {
          T loaded[part];
          load_part<part>(problem, from, first + c, exists ? D : 0, loaded);
#pragma unroll
          for (int i = 0; i < part; ++i) x[(c + i) * kTileRows + threadIdx.x] = loaded[i];
        }
      }
#pragma unroll 4
      for (int i = threadIdx.x; i < kFunctions * kColumns; i += kThreads) {
        const int f = i / kColumns, c = i % kColumns;
        const bool inside = f < functions && first + c < D;
        directions[c * kDirectionStride + f] = inside ? -static_cast<T>(all[f * D + first + c]) : T{0};
      }
      __syncthreads();
      const int columns = at_most(D - first, kColumns);
#pragma unroll 4
      for (int c = 0; c < columns; ++c) {
        const Four<T> low = four(x + c * kTileRows + thread_row), high = four(x + c * kTileRows + thread_row + 4);
        const Four<T> direction = four(directions + c * kDirectionStride + thread_function);
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r)
#pragma unroll
          for (int f = 0; f < kThreadFunctions; ++f)
            sum[r][f] += (r < 4 ? low.at[r % 4] : high.at[r % 4]) * direction.at[f];
      }
    }
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r)
#pragma unroll
      for (int f = 0; f < kThreadFunctions; ++f) push_sign(codes[r][f], sum[r][f]);
  }

  // through shared memory, so that neighbouring threads write neighbouring rows
  __syncthreads();
  int32_t* tile_codes = shared_memory<int32_t>();
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r)
#pragma unroll
    for (int f = 0; f < kThreadFunctions; ++f)
      tile_codes[(thread_function + f) * kCodeStride + thread_row + r] = static_cast<int32_t>(codes[r][f]);
  __syncthreads();
  store_codes(problem, tile_codes, batch, head, first_function, functions, row);
}

// The same for 16-bit rows that can be loaded 16 bytes at a time, on tensor cores: a warp multiplies 32 rows with the
// directions of 32 hash functions, a bit at a time. A direction is the sum of three terms in the rows' type, which
// between them have all bits of a float32: what is added is exact.
constexpr int kTerms = 3, kMaxProductColumns = 256;
constexpr int kWarpRows = 32, kRowTiles = kWarpRows / 16, kFunctionTiles = kFunctions / 8;
// elements between rows in shared memory: 16 bytes more than they take, against bank conflicts
constexpr int kTermStride = kColumns + kPiece;

__host__ __device__ constexpr int64_t tile_stride(int64_t D) {
  return (D + kColumns - 1) / kColumns * kColumns + kPiece;
}

template <class In>
size_t gaussian_mma_bytes(int64_t D) {
  const size_t tiles = (kTileRows * tile_stride(D) + kTerms * kFunctions * kTermStride) * sizeof(In);
  return std::max(tiles, kFunctions * kCodeStride * sizeof(int32_t));
}

template <class In>
__global__ void __launch_bounds__(kThreads, 3)
    hash_gaussian_mma_kernel(AnyRows rows, const Problem problem, const Grid grid) {
  const auto [batch, head, tile, group] = grid.find();
  const int64_t first_function = group * kFunctions, first_row = tile * kTileRows;
  const int functions = at_most(problem.num_hash - first_function, kFunctions);
  const int D = static_cast<int>(problem.D), stride = static_cast<int>(tile_stride(D));
  const int lane = threadIdx.x % kWarp, warp_row = threadIdx.x / kWarp * kWarpRows;

  // [kTileRows][stride] and [kTerms][kFunctions][kTermStride]
  In *x = shared_memory<In>(), *terms = x + kTileRows * stride;
  const int pieces = (stride - kPiece) / kPiece;
#pragma unroll 4
  for (int i = threadIdx.x; i < kTileRows * pieces; i += kThreads) {
    const int row = i / pieces, column = i % pieces * kPiece;
    uint4 piece = make_uint4(0, 0, 0, 0);
    if (first_row + row < problem.N && column < D)
      piece = *reinterpret_cast<const uint4*>(rows.at(batch, head, first_row + row) + column * sizeof(In));
    *reinterpret_cast<uint4*>(x + row * stride + column) = piece;
  }
  const In* my_rows = x + (warp_row + lane % 16) * stride + lane / 16 * 8;
  const In* my_terms = terms + (lane / 16 * 8 + lane % 8) * kTermStride + lane / 8 % 2 * 8;
  uint32_t codes[kRowTiles][kFunctionTiles][4] = {};
#pragma unroll 1
  for (int bit = problem.hash_code_len - 1; bit >= 0; --bit) {
    const float* all = problem.parameters +
                       ((head * problem.hash_code_len + bit) * problem.num_hash + first_function) * problem.D;
    float sums[kRowTiles][kFunctionTiles][4] = {};
#pragma unroll 1
    for (int first = 0; first < D; first += kColumns) {
      __syncthreads();
#pragma unroll 4
      for (int i = threadIdx.x; i < kFunctions * kColumns / 2; i += kThreads) {
        const int f = i / (kColumns / 2), c = i % (kColumns / 2) * 2;
        float2 left = make_float2(0, 0);
        if (f < functions && first + c < D) {
          // one by one: parameters may begin at any float
          const float* direction = all + f * D + first + c;
          left = make_float2(-direction[0], -direction[1]);
        }
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
          const In pair[2] = {static_cast<In>(left.x), static_cast<In>(left.y)};
          memcpy(terms + (term * kFunctions + f) * kTermStride + c, pair, sizeof(pair));
          left = make_float2(left.x - static_cast<float>(pair[0]), left.y - static_cast<float>(pair[1]));
        }
      }
      __syncthreads();
#pragma unroll
      for (int c = 0; c < kColumns; c += 16) {
        uint32_t a[kRowTiles][4];
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) load_matrices<false>(a[r], my_rows + r * 16 * stride + first + c);
        // the smallest terms first
#pragma unroll
        for (int term = kTerms - 1; term >= 0; --term)
#pragma unroll
          for (int f = 0; f < kFunctionTiles; f += 2) {
            uint32_t b[4];
            load_matrices<false>(b, my_terms + (term * kFunctions + f * 8) * kTermStride + c);
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
              multiply_add<In>(sums[r][f], a[r], {b[0], b[1]});
              multiply_add<In>(sums[r][f + 1], a[r], {b[2], b[3]});
            }
          }
      }
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int f = 0; f < kFunctionTiles; ++f)
#pragma unroll
        for (int i = 0; i < 4; ++i) push_sign(codes[r][f][i], sums[r][f][i]);
  }

  // through shared memory, so that neighbouring threads write neighbouring rows
  __syncthreads();
  int32_t* tile_codes = shared_memory<int32_t>();
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int f = 0; f < kFunctionTiles; ++f)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        tile_codes[(f * 8 + lane % 4 * 2 + i % 2) * kCodeStride + warp_row + r * 16 + lane / 4 + i / 2 * 8] =
            static_cast<int32_t>(codes[r][f][i]);
  __syncthreads();
  store_codes(problem, tile_codes, batch, head, first_function, functions, first_row + threadIdx.x);
}

template <class In>
void launch_gaussian(const Device& device, const AnyRows& rows, const Problem& problem) {
  if constexpr (sizeof(In) == 2)
    if (problem.vectors && problem.D <= kMaxProductColumns)
      return launch_grid(device, hash_gaussian_mma_kernel<In>, kTileRows, kFunctions, gaussian_mma_bytes<In>(problem.D),
                         rows, problem);
  using T = Accumulator<In>;
  launch_grid(device, hash_gaussian_kernel<T>, kTileRows, kFunctions,
              kColumns * (kTileRows + kDirectionStride) * sizeof(T), rows, problem);
}

template <class In>
bool in_vectors(const Tensor& x) {
  constexpr int64_t count = 16 / sizeof(In);
  bool result = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0 && x.size(3) % count == 0;
  for (int64_t dim = 0; dim < 3; ++dim) result = result && (x.size(dim) == 1 || x.stride(dim) % count == 0);
  return result;
}

Tensor hash_cuda(const Tensor& input, const Tensor& parameters, const std::optional<Tensor>& input_mask,
                 int64_t num_hash, int64_t hash_code_len, bool use_hadamard) {
  check_hash(input, parameters, input_mask, num_hash, hash_code_len, use_hadamard);
  const int64_t size = parameters.size(2);
  STD_TORCH_CHECK(!use_hadamard || size <= kMaxSize, "hash_hadamard takes transforms of at most ", kMaxSize,
                  " columns on CUDA, got ", size);
  const Device device(input);
  const Tensor x = dense_rows(input);
  const std::optional<Tensor> mask = dense_mask(input_mask);
  const int64_t B = x.size(0), H = x.size(1), N = x.size(2);
  Tensor out = empty_tensor(x, {B, H, num_hash, N}, code_dtype(hash_code_len));
  dispatch_floating(x, [&](auto element) {
    using In = decltype(element);
    const Problem problem = {
        .B = B,
        .H = H,
        .N = N,
        .D = x.size(3),
        .num_hash = num_hash,
        .dtype = x.scalar_type(),
        .hash_code_len = static_cast<int>(hash_code_len),
        .mask = mask.has_value() ? mask_bytes(*mask) : nullptr,
        .parameters = parameters.const_data_ptr<float>(),
        .size = size,
        .vectors = in_vectors<In>(x),
        .codes = out.mutable_data_ptr(),
        .wide = out.scalar_type() == ScalarType::Int,
    };
    constexpr int64_t bytes = sizeof(In);
    const AnyRows rows = {static_cast<const unsigned char*>(x.const_data_ptr()), x.stride(0) * bytes,
                          x.stride(1) * bytes, x.stride(2) * bytes};
    // whatever the number of rows: those of queries and keys are to have the same codes
    if constexpr (std::is_same_v<In, BFloat16>)
      if (use_hadamard && size == kWgmmaColumns && hash_code_len <= kMostProductBits && device.has_wgmma())
        return launch_hash_products(device, x, problem);
    if (use_hadamard)
      launch_hadamard<Accumulator<In>, kFunctions>(device, rows, problem);
    else
      launch_gaussian<In>(device, rows, problem);
  });
  return out;
}

Tensor hash_hadamard_cuda(const Tensor& x, const Tensor& parameters, const std::optional<Tensor>& mask,
                          int64_t num_hash, int64_t hash_code_len) {
  return hash_cuda(x, parameters, mask, num_hash, hash_code_len, true);
}

Tensor hash_gaussian_cuda(const Tensor& x, const Tensor& parameters, const std::optional<Tensor>& mask,
                          int64_t num_hash, int64_t hash_code_len) {
  return hash_cuda(x, parameters, mask, num_hash, hash_code_len, false);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) {
  if (!may_run_here()) return;
  m.impl("hash_hadamard", TORCH_BOX(&hash_hadamard_cuda));
  m.impl("hash_gaussian", TORCH_BOX(&hash_gaussian_cuda));
}

}  // namespace yoso
