#include "proto/changes.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

// A seventh of its bits, rounded up, and 1 for 0, without a division.
size_t CountBytes(uint64_t count) { return (static_cast<size_t>(std::bit_width(count | 1)) * 9 + 64) / 64; }

// Returns where it ends.
char* PutCount(uint64_t count, char* to) {
  for (; count >= 0x80; count >>= 7) *to++ = static_cast<char>(count | 0x80);
  *to++ = static_cast<char>(count);
  return to;
}

// None: the bytes end in the middle of it, or it has more bits than 64.
std::optional<uint64_t> TakeCount(absl::string_view* from) {
  uint64_t count = 0;
  for (size_t i = 0; i < from->size() && i < 9; ++i) {
    const auto byte = static_cast<uint8_t>((*from)[i]);
    count |= uint64_t{byte & 0x7fu} << (7 * i);
    if ((byte & 0x80) != 0) continue;
    from->remove_prefix(i + 1);
    return count;
  }
  return std::nullopt;
}

// Calls `visit` with the width as a constant, so that a code is read in one instruction.
template <typename Visit>
auto WithWidth(size_t width, const Visit& visit) {
  if (width == 1) return visit(std::integral_constant<size_t, 1>());
  if (width == 2) return visit(std::integral_constant<size_t, 2>());
  return visit(std::integral_constant<size_t, 4>());
}

template <size_t kWidth>
uint64_t CodeAt(const std::byte* codes, size_t index) {
  uint64_t code = 0;
  std::memcpy(&code, codes + index * kWidth, kWidth);
  return code;
}

// What takes the old code to the new one, as a count that is small where they are near.
template <size_t kWidth>
uint64_t Difference(uint64_t before, uint64_t after) {
  constexpr auto kUnused = static_cast<int>(64 - 8 * kWidth);
  const auto signed_difference = static_cast<int64_t>((after - before) << kUnused) >> kUnused;
  return static_cast<uint64_t>(signed_difference) << 1 ^ static_cast<uint64_t>(signed_difference >> 63);
}

uint64_t Moved(uint64_t before, uint64_t difference) { return before + (difference >> 1 ^ (0 - (difference & 1))); }

// Of the codes that lie in a word side by side a bit each, the first the lowest: whether it is not 0.
template <size_t kWidth>
uint64_t NonZero(uint64_t codes) {
  constexpr int kBits = 8 * kWidth, kCodes = 8 / kWidth;
  constexpr uint64_t kLowest = ~uint64_t{0} / (~uint64_t{0} >> (64 - kBits)), kHighest = kLowest << (kBits - 1);
  // Of a code that is not 0, its highest bit or a carry into that.
  const uint64_t of_each = (((codes & ~kHighest) + ~kHighest) | codes) & kHighest;
  // Code k's bit is moved to bit 64 - kCodes + k; no two products meet, so none is carried.
  uint64_t places = 0;
  for (int k = 0; k < kCodes; ++k) places |= uint64_t{1} << (64 - kCodes + k - k * kBits);
  return (of_each >> (kBits - 1)) * places >> (64 - kCodes);
}

// A bit for each element: whether it has changed.
template <size_t kWidth>
std::vector<uint64_t> FindChanged(absl::Span<const std::byte> before, absl::Span<const std::byte> after) {
  constexpr size_t kTogether = 64, kInWord = 8 / kWidth;
  const size_t elements = before.size() / kWidth;
  std::vector<uint64_t> changed((elements + kTogether - 1) / kTogether);
  size_t i = 0;
  for (; i + kTogether <= elements; i += kTogether) {
    const std::byte *const a = before.data() + i * kWidth, *const b = after.data() + i * kWidth;
    if (std::memcmp(a, b, kTogether * kWidth) == 0) continue;
    for (size_t k = 0; k < kTogether; k += kInWord) {
      changed[i / kTogether] |= NonZero<kWidth>(CodeAt<8>(a + k * kWidth, 0) ^ CodeAt<8>(b + k * kWidth, 0)) << k;
    }
  }
  for (; i < elements; ++i) {
    const bool differs = CodeAt<kWidth>(before.data(), i) != CodeAt<kWidth>(after.data(), i);
    changed[i / kTogether] |= uint64_t{differs} << (i % kTogether);
  }
  return changed;
}

// The indices of the bits that are set, `count` of them. Found once, since a processor guesses the next one wrong.
std::vector<uint32_t> IndicesOf(const std::vector<uint64_t>& bits, uint64_t count) {
  std::vector<uint32_t> indices(count);
  uint32_t* to = indices.data();
  for (size_t word = 0; word < bits.size(); ++word) {
    for (uint64_t left = bits[word]; left != 0; left &= left - 1) {
      *to++ = static_cast<uint32_t>(word * 64 + static_cast<size_t>(std::countr_zero(left)));
    }
  }
  return indices;
}

// Calls `each` with every run of indices that follow each other: the numbers left out before it, and its length.
template <typename Each>
void ForEachRun(const std::vector<uint32_t>& indices, const Each& each) {
  uint64_t past = 0;  // where the run before ended
  for (size_t first = 0, end = 0; first < indices.size(); first = end) {
    for (end = first + 1; end < indices.size() && indices[end] == indices[end - 1] + 1; ++end) continue;
    each(indices[first] - past, end - first);
    past = indices[end - 1] + uint64_t{1};
  }
}

// What each coding takes.
struct Sizes {
  uint64_t gaps = 0, runs = 0, differences = 0;
};

template <size_t kWidth>
Sizes SizesOf(const std::vector<uint32_t>& changed, const std::byte* before, const std::byte* after) {
  Sizes sizes;
  uint64_t past = 0;
  for (const uint64_t i : changed) {
    sizes.gaps += CountBytes(i - past);
    past = i + 1;
    sizes.differences += CountBytes(Difference<kWidth>(CodeAt<kWidth>(before, i), CodeAt<kWidth>(after, i)));
  }
  ForEachRun(changed,
             [&](uint64_t skipped, uint64_t length) { sizes.runs += CountBytes(skipped) + CountBytes(length - 1); });
  return sizes;
}

// Into memory that has room for exactly that.
void PutPositions(const std::vector<uint64_t>& bits, const std::vector<uint32_t>& changed, PositionCoding coding,
                  absl::Span<char> room) {
  char* to = room.data();
  uint64_t past = 0;
  switch (coding) {
    case PositionCoding::kAll:
      break;
    case PositionCoding::kBitmap:
      std::memcpy(to, bits.data(), room.size());
      break;
    case PositionCoding::kGaps:
      for (const uint64_t i : changed) {
        to = PutCount(i - past, to);
        past = i + 1;
      }
      break;
    case PositionCoding::kRuns:
      ForEachRun(changed, [&](uint64_t skipped, uint64_t length) { to = PutCount(length - 1, PutCount(skipped, to)); });
  }
}

template <size_t kWidth>
void PutValues(const std::vector<uint32_t>& changed, const std::byte* before, const std::byte* after,
               ValueCoding coding, char* to) {
  for (const uint64_t i : changed) {
    if (coding == ValueCoding::kDifferences) {
      to = PutCount(Difference<kWidth>(CodeAt<kWidth>(before, i), CodeAt<kWidth>(after, i)), to);
    } else {
      std::memcpy(to, after + i * kWidth, kWidth);
      to += kWidth;
    }
  }
}

// The positions that changes name, one after another.
class PositionReader {
 public:
  explicit PositionReader(const ChangesView& changes) : coding_(changes.position_coding), left_(changes.positions) {}

  // None: there is no further one, or it is malformed.
  std::optional<uint64_t> Next(uint64_t elements) {
    if (in_run_ > 0) {
      --in_run_;
    } else if (!Seek(elements)) {
      return std::nullopt;
    }
    return next_ < elements ? std::optional<uint64_t>(next_++) : std::nullopt;
  }
  // Whether nothing is there that was not read.
  bool Done(uint64_t elements) {
    if (coding_ == PositionCoding::kBitmap) return left_.size() == (elements + 7) / 8 && !SeekBit(left_.size() * 8);
    return left_.empty() && in_run_ == 0;
  }

 private:
  bool Seek(uint64_t elements) {
    if (coding_ == PositionCoding::kAll) return true;
    if (coding_ == PositionCoding::kBitmap) return left_.size() == (elements + 7) / 8 && SeekBit(elements);
    const auto skipped = TakeCount(&left_);
    if (!skipped || *skipped > elements) return false;
    next_ += *skipped;
    if (coding_ == PositionCoding::kGaps) return true;
    const auto more = TakeCount(&left_);
    if (!more || *more > elements) return false;
    in_run_ = *more;
    return true;
  }
  bool SeekBit(uint64_t end) {
    for (; next_ < end; ++next_) {
      const auto byte = static_cast<uint8_t>(left_[next_ / 8]);
      if ((byte >> (next_ % 8)) == 0) {
        next_ |= 7;
      } else if ((byte >> (next_ % 8) & 1) != 0) {
        return true;
      }
    }
    return false;
  }

  const PositionCoding coding_;
  absl::string_view left_;  // of a bitmap all
  uint64_t next_ = 0;
  uint64_t in_run_ = 0;  // elements to come of the run in hand
};

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("changes of weights are malformed: ", what));
}

template <size_t kWidth>
FoundChanges Find(absl::Span<const std::byte> before, absl::Span<const std::byte> after, uint64_t most_bytes) {
  const std::vector<uint64_t> bits = FindChanged<kWidth>(before, after);
  FoundChanges found;
  for (const uint64_t word : bits) found.count += static_cast<uint64_t>(std::popcount(word));
  if (found.count > most_bytes) return found;  // a value takes a byte at least
  if (found.count == 0) return {.changes = Changes{}};
  const std::vector<uint32_t> changed = IndicesOf(bits, found.count);
  const Sizes sizes = SizesOf<kWidth>(changed, before.data(), after.data());
  const uint64_t bitmap = (before.size() / kWidth + 7) / 8, codes = found.count * kWidth;
  Changes changes{.position_coding = sizes.runs < sizes.gaps ? PositionCoding::kRuns : PositionCoding::kGaps,
                  .value_coding = sizes.differences < codes ? ValueCoding::kDifferences : ValueCoding::kCodes,
                  .count = found.count};
  if (bitmap < std::min(sizes.gaps, sizes.runs)) changes.position_coding = PositionCoding::kBitmap;
  const uint64_t positions = std::min({bitmap, sizes.gaps, sizes.runs}), values = std::min(sizes.differences, codes);
  if (positions + values > most_bytes) return found;
  changes.positions.resize(positions);
  changes.values.resize(values);
  PutPositions(bits, changed, changes.position_coding, absl::MakeSpan(changes.positions));
  PutValues<kWidth>(changed, before.data(), after.data(), changes.value_coding, changes.values.data());
  found.changes = std::move(changes);
  return found;
}

template <size_t kWidth>
absl::Status Apply(const ChangesView& changes, absl::Span<std::byte> chunk) {
  const uint64_t elements = chunk.size() / kWidth;
  if (changes.count > elements) return Malformed("there are more of them than elements");
  if (changes.position_coding == PositionCoding::kAll && (changes.count != elements || !changes.positions.empty())) {
    return Malformed("all elements are said to be there, and are not");
  }
  const bool differences = changes.value_coding == ValueCoding::kDifferences;
  if (!differences && changes.values.size() != changes.count * kWidth)
    return Malformed("the values' length is not right");
  PositionReader positions(changes);
  absl::string_view values = changes.values;
  for (uint64_t n = 0; n < changes.count; ++n) {
    const auto at = positions.Next(elements);
    if (!at) return Malformed(absl::StrCat("position ", n, " is missing, or past the chunk's end"));
    std::byte* const place = chunk.data() + *at * kWidth;
    if (!differences) {
      std::memcpy(place, values.data(), kWidth);
      values.remove_prefix(kWidth);
      continue;
    }
    const auto difference = TakeCount(&values);
    if (!difference) return Malformed(absl::StrCat("value ", n, " is missing"));
    const uint64_t code = Moved(CodeAt<kWidth>(place, 0), *difference);
    std::memcpy(place, &code, kWidth);
  }
  if (!values.empty() || !positions.Done(elements)) return Malformed("something follows the last one");
  return absl::OkStatus();
}

}  // namespace

FoundChanges FindChanges(absl::Span<const std::byte> before, absl::Span<const std::byte> after, size_t width,
                         uint64_t most_bytes) {
  return WithWidth(width, [&](auto constant) { return Find<constant()>(before, after, most_bytes); });
}

absl::Status ApplyChanges(const ChangesView& changes, size_t width, absl::Span<std::byte> chunk) {
  return WithWidth(width, [&](auto constant) { return Apply<constant()>(changes, chunk); });
}

void ForEachChanged(const ChangesView& changes, uint64_t elements, absl::FunctionRef<void(uint64_t place)> each) {
  PositionReader positions(changes);
  for (uint64_t n = 0; n < changes.count; ++n) {
    const auto at = positions.Next(elements);
    if (!at) return;
    each(*at);
  }
}

}  // namespace ballast
