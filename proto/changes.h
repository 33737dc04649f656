// What a chunk of weights in its serving format has changed from one version to the next, coded without loss, for both
// ends of the wire: proto/PROTOCOL.md, "Following a run". Which elements: positions in the coding of the three that takes
// fewest bytes. What they are now: their codes, or how much these went up or down, whichever takes fewer.
//
// An element is a code of 1, 2 or 4 bytes, little end first. Pure functions; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ballast {

// The numbers are the wire's. Counts are in base 128, the lowest seven bits first, as Protocol Buffers have them.
enum class PositionCoding : uint8_t {
  kAll = 0,     // no positions: every element of the chunk is there
  kBitmap = 1,  // a bit for each element, as in proto/bitmap.h
  kGaps = 2,    // before each changed element, how many unchanged ones there are since the one before
  kRuns = 3,    // for each run of changed elements: how many unchanged ones come before it, and its length less one
};
enum class ValueCoding : uint8_t {
  kCodes = 0,        // the new codes
  kDifferences = 1,  // new code less the old one, of the codes' width, wrapping; 0, -1, 1, -2, ... as 0, 1, 2, 3, ...
};

struct Changes {
  PositionCoding position_coding = PositionCoding::kGaps;
  ValueCoding value_coding = ValueCoding::kCodes;
  uint64_t count = 0;  // of elements; 0: nothing has changed, and all else is empty
  std::string positions = {}, values = {};
  uint64_t bytes() const { return positions.size() + values.size(); }
};

struct FoundChanges {
  uint64_t count = 0;                   // of elements that have changed
  std::optional<Changes> changes = {};  // none: they would take more than was allowed
};

// From `before` to `after`, which have the same length, a multiple of the width: 1, 2 or 4. Takes 4 bytes for each element that
// has changed, meanwhile.
FoundChanges FindChanges(absl::Span<const std::byte> before, absl::Span<const std::byte> after, size_t width,
                         uint64_t most_bytes);

// Changes as they lie in a message.
struct ChangesView {
  PositionCoding position_coding;
  ValueCoding value_coding;
  uint64_t count;
  absl::string_view positions, values;
};

// Makes `chunk`, which has what was before, what is after. INVALID_ARGUMENT says what is malformed; the chunk's contents
// are then of no use.
absl::Status ApplyChanges(const ChangesView& changes, size_t width, absl::Span<std::byte> chunk);

// Calls `each` with the place in the chunk of every element that is there, ascending. Of changes that ApplyChanges has taken.
void ForEachChanged(const ChangesView& changes, uint64_t elements, absl::FunctionRef<void(uint64_t place)> each);

}  // namespace ballast
