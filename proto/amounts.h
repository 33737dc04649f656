// Amounts as people write them, in files and on command lines: 3, 64MiB.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast {

// "3". INVALID_ARGUMENT says what is wanted.
absl::StatusOr<uint64_t> ReadCount(absl::string_view text);
// "64MiB", "64MB", or bytes; likewise.
absl::StatusOr<uint64_t> ReadBytes(absl::string_view text);
// Text that ReadBytes reads back, in the largest power of 1024 that leaves a whole number.
std::string BytesText(uint64_t bytes);

}  // namespace ballast
