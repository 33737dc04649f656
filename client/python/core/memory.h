// Memory as Python gives it, (address, bytes). It stays the caller's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace ballast {

using Address = uintptr_t;

inline absl::Span<const std::byte> BytesAt(Address address, uint64_t bytes) {
  return {reinterpret_cast<const std::byte*>(address), bytes};
}

}  // namespace ballast
