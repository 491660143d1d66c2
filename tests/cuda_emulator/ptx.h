// What PTX's instructions do, for the functions that translate.py writes. Registers are C++ variables of their size;
// integers wrap (-fwrapv).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "tensor_cores.h"
#include "threads.h"
#include "warps.h"

#define PTX_INLINE inline __attribute__((always_inline))

namespace ptx {

using emulator::Access;

// 16 bits of a register that are such a number.
struct Half {
  uint16_t bits;
  explicit operator float() const { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
};
struct BFloat16 {
  uint16_t bits;
  explicit operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};
struct BFloat16Pair {
  BFloat16 of[2];
};

// Memory. Global addresses are the CPU's own; a block's shared memory begins at 0.

// What few accesses need is a call, behind one branch, since kernels have thousands of accesses to compile.
template <unsigned bytes, Access access>
[[gnu::noinline, gnu::cold]] void look_at(uint64_t address, const char* place) {
  emulator::look_at(access, reinterpret_cast<const void*>(address), bytes, place);
}
template <unsigned bytes, Access access>
[[gnu::noinline, gnu::cold]] void look_at_shared(uint32_t offset, const char* place) {
  if (uint64_t{offset} + bytes > emulator::block.shared_bytes)
    emulator::fail("an address past the shared memory", place);
  emulator::look_at(access, emulator::shared_memory + offset, bytes, place);
}

template <class T, unsigned count, Access access>
PTX_INLINE T* memory_at(uint64_t address, const char* place) {
  constexpr unsigned bytes = count * sizeof(T);
  const bool looks = (address % bytes != 0) | (emulator::watcher != nullptr);
  if (__builtin_expect(looks, false)) look_at<bytes, access>(address, place);
  return reinterpret_cast<T*>(address);
}
template <class T, unsigned count, Access access>
PTX_INLINE T* shared_at(uint32_t offset, const char* place) {
  constexpr unsigned bytes = count * sizeof(T);
  const bool outside = uint64_t{offset} + bytes > emulator::block.shared_bytes;
  const bool looks = outside | (offset % bytes != 0) | (emulator::watcher != nullptr);
  if (__builtin_expect(looks, false)) look_at_shared<bytes, access>(offset, place);
  return reinterpret_cast<T*>(emulator::shared_memory + offset);
}
PTX_INLINE uint64_t from_shared(uint64_t offset) {
  return reinterpret_cast<uint64_t>(emulator::shared_memory) + offset;
}
PTX_INLINE uint64_t to_shared(uint64_t address) {
  return address - reinterpret_cast<uint64_t>(emulator::shared_memory);
}

template <unsigned bytes>
inline void copy_ahead(uint32_t to, uint64_t from, uint32_t bytes_read, const char* place) {
  if (bytes_read != 0 && bytes_read != bytes) emulator::fail("a copy of a part", place);
  auto* target = shared_at<unsigned char, bytes, Access::kWriteUntilWaitedFor>(to, place);
  const auto* source = bytes_read == 0 ? nullptr : reinterpret_cast<const unsigned char*>(from);
  emulator::copy_ahead({target, source, bytes, place});
}

// Numbers.

template <class T>
PTX_INLINE T quotient(T x, T y) {
  if constexpr (std::is_integral_v<T>)
    if (y == 0) emulator::fail("a division by zero");
  return x / y;
}
template <class T>
PTX_INLINE T remainder(T x, T y) {
  if (y == 0) emulator::fail("a division by zero");
  return x % y;
}
// the other one, where one is not a number
template <class T>
PTX_INLINE T minimum(T x, T y) {
  if constexpr (std::is_floating_point_v<T>) return std::fmin(x, y);
  return x < y ? x : y;
}
template <class T>
PTX_INLINE T maximum(T x, T y) {
  if constexpr (std::is_floating_point_v<T>) return std::fmax(x, y);
  return x > y ? x : y;
}
template <class T>
PTX_INLINE T negative(T x) {
  return -x;
}
template <class T>
PTX_INLINE T absolute(T x) {
  if constexpr (std::is_floating_point_v<T>) return std::fabs(x);
  return x < 0 ? -x : x;
}
// y with the sign of x
template <class T>
PTX_INLINE T copy_sign(T x, T y) {
  return std::copysign(y, x);
}
// rounded down; products of floats, and sums of numbers of like size, are exact as doubles
PTX_INLINE float fused_multiply_add_down(float x, float y, float z) {
  const float sum = std::fma(x, y, z);
  return double{x} * y < double{sum} - z ? std::nextafter(sum, -std::numeric_limits<float>::infinity()) : sum;
}
template <class T>
PTX_INLINE T power_of_two(T x) {
  return std::exp2(x);
}
// in 0..1, and 0 for what is not a number
PTX_INLINE float saturated(float x) { return x > 0 ? std::fmin(x, 1.0f) : 0; }
template <class T>
PTX_INLINE T square_root(T x) {
  return std::sqrt(x);
}
template <class T>
PTX_INLINE T reciprocal(T x) {
  return 1 / x;
}
template <class T>
PTX_INLINE T reciprocal_square_root(T x) {
  return 1 / std::sqrt(x);
}
// What an instruction that approximates may give: the PTX ISA allows each of them an error of 2^-23 of the number, or
// more. Powers of two are exact, as on hardware; how large another's error is, its bits decide.
PTX_INLINE float approximation(double exact) {
  const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(exact));
  const auto part = static_cast<int32_t>(bits % (1 << 23) * 2654435761u) * 0x1p-31;
  return static_cast<float>(exact * (1 + part * 0x1p-24));
}
// a zero of the same sign for a denormal number
template <class T>
PTX_INLINE T flushed(T x) {
  return std::fabs(x) < std::numeric_limits<T>::min() ? std::copysign(T{0}, x) : x;
}
template <class T>
PTX_INLINE bool unordered(T x, T y) {
  return std::isnan(x) || std::isnan(y);
}

enum class Rounding { none, rn, rni, rzi, rmi, rpi };

template <class To, Rounding rounding, class From>
PTX_INLINE auto convert(From x) {
  if constexpr (std::is_same_v<From, Half> || std::is_same_v<From, BFloat16>) {
    return convert<To, rounding>(static_cast<float>(x));
  } else if constexpr (std::is_same_v<To, Half>) {
    static_assert(std::is_same_v<From, float> && rounding == Rounding::rn);
    return std::bit_cast<uint16_t>(static_cast<_Float16>(x));
  } else if constexpr (std::is_same_v<To, BFloat16>) {
    static_assert(std::is_same_v<From, float> && rounding == Rounding::rn);
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    return std::isnan(x) ? uint16_t{0x7FFF} : static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  } else if constexpr (std::is_floating_point_v<From> && rounding > Rounding::rn) {
    const From whole = rounding == Rounding::rni   ? std::nearbyint(x)
                       : rounding == Rounding::rzi ? std::trunc(x)
                       : rounding == Rounding::rmi ? std::floor(x)
                                                   : std::ceil(x);
    if constexpr (std::is_floating_point_v<To>) {
      return static_cast<To>(whole);
    } else {
      using Limits = std::numeric_limits<To>;
      if (std::isnan(x)) return To{0};
      if (whole >= std::ldexp(From{1}, Limits::digits)) return Limits::max();
      return whole < static_cast<From>(Limits::min()) ? Limits::min() : static_cast<To>(whole);
    }
  } else {
    static_assert(std::is_integral_v<From> || std::is_floating_point_v<To>);
    return static_cast<To>(x);
  }
}

PTX_INLINE BFloat16Pair fused_multiply_add(BFloat16Pair x, BFloat16Pair y, BFloat16Pair z) {
  for (int i = 0; i < 2; ++i) {
    // rounded twice only where a product and a sum are hundreds of powers of two apart
    const double sum = double{static_cast<float>(x.of[i])} * static_cast<float>(y.of[i]) + static_cast<float>(z.of[i]);
    x.of[i].bits = convert<BFloat16, Rounding::rn>(static_cast<float>(sum));
  }
  return x;
}

// Bits.

// Each byte of the result is one of the eight, as four bits of the selector say.
PTX_INLINE uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t place = selector >> 4 * i & 0xF;
    if (place > 7) emulator::fail("a byte's sign");
    picked |= static_cast<uint32_t>(bytes >> 8 * place & 0xFF) << 8 * i;
  }
  return picked;
}
template <class T>
PTX_INLINE T complement(T x) {
  if constexpr (std::is_same_v<T, bool>) return !x;
  return ~x;
}
template <class T>
PTX_INLINE uint32_t count_ones(T x) {
  return std::popcount(x);
}
template <class T>
PTX_INLINE uint32_t count_leading_zeros(T x) {
  return std::countl_zero(x);
}
template <class T>
PTX_INLINE T reverse_bits(T x) {
  T result = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); ++i) result = result << 1 | (x >> i & 1);
  return result;
}
template <class T>
PTX_INLINE T shift_left(T x, uint32_t by) {
  return by < 8 * sizeof(T) ? x << by : 0;
}
template <class T>
PTX_INLINE T shift_right(T x, uint32_t by) {
  return by < 8 * sizeof(T) ? x >> by : x < 0 ? -1 : 0;
}
template <bool shift_amount, class T>
PTX_INLINE uint32_t find_bit(T x) {
  static_assert(std::is_unsigned_v<T>);
  const uint32_t zeros = std::countl_zero(x);
  return x == 0 ? ~0u : shift_amount ? zeros : 8 * sizeof(T) - 1 - zeros;
}
template <class T>
PTX_INLINE T insert_bits(T x, T into, uint32_t at, uint32_t length) {
  const T ones = length % 256 < 8 * sizeof(T) ? (T{1} << length % 256) - 1 : ~T{0};
  const T mask = shift_left<T>(ones, at % 256);
  return (into & ~mask) | (shift_left<T>(x, at % 256) & mask);
}
template <class Part, class Whole>
PTX_INLINE auto parts(Whole x) {
  return std::bit_cast<std::array<Part, sizeof(Whole) / sizeof(Part)>>(x);
}

}  // namespace ptx
