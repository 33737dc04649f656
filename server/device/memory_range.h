// Bytes of memory, of a device or the host: where they begin and how many.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>

#include "absl/types/span.h"

namespace ballast {

using MemoryRange = absl::Span<const std::byte>;

inline bool Overlap(MemoryRange a, MemoryRange b) {
  constexpr std::less<const std::byte*> kBefore;
  return kBefore(a.data(), b.data() + b.size()) && kBefore(b.data(), a.data() + a.size());
}

// The least that holds both.
inline MemoryRange Around(MemoryRange a, MemoryRange b) {
  constexpr std::less<const std::byte*> kBefore;
  if (a.empty()) return b;
  const std::byte* const begin = std::min(a.data(), b.data(), kBefore);
  return {begin, static_cast<size_t>(std::max(a.data() + a.size(), b.data() + b.size(), kBefore) - begin)};
}

}  // namespace ballast
