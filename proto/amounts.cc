#include "proto/amounts.h"

#include <array>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

struct Unit {
  absl::string_view name;
  uint64_t bytes;
};
// Longest names first where one ends in another.
constexpr std::array<Unit, 9> kUnits = {{{"KiB", 1ULL << 10},
                                         {"MiB", 1ULL << 20},
                                         {"GiB", 1ULL << 30},
                                         {"TiB", 1ULL << 40},
                                         {"KB", 1'000},
                                         {"MB", 1'000'000},
                                         {"GB", 1'000'000'000},
                                         {"TB", 1'000'000'000'000},
                                         {"B", 1}}};

}  // namespace

absl::StatusOr<uint64_t> ReadCount(absl::string_view text) {
  uint64_t value = 0;
  if (absl::SimpleAtoi(text, &value) && absl::ascii_isdigit(static_cast<unsigned char>(text[0]))) return value;
  return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not a whole number"));
}

absl::StatusOr<uint64_t> ReadBytes(absl::string_view text) {
  absl::string_view digits = text;
  uint64_t unit_bytes = 1;
  for (const Unit& unit : kUnits) {
    if (!absl::EndsWith(text, unit.name)) continue;
    digits = absl::StripTrailingAsciiWhitespace(text.substr(0, text.size() - unit.name.size()));
    unit_bytes = unit.bytes;
    break;
  }
  const absl::StatusOr<uint64_t> count = ReadCount(digits);
  if (!count.ok() || *count > std::numeric_limits<uint64_t>::max() / unit_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not a size; write it as 64MiB, 64MB or bytes"));
  }
  return *count * unit_bytes;
}

std::string BytesText(uint64_t bytes) {
  for (auto unit = kUnits.begin() + 3;; --unit) {  // TiB down to KiB
    if (bytes > 0 && bytes % unit->bytes == 0) return absl::StrCat(bytes / unit->bytes, unit->name);
    if (unit == kUnits.begin()) return absl::StrCat(bytes);
  }
}

}  // namespace ballast
