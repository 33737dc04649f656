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

size_t CountBytes(uint64_t count) { return count == 0 ? 1 : (static_cast<size_t>(std::bit_width(count)) + 6) / 7; }

void PutCount(uint64_t count, std::string* to) {
  for (; count >= 0x80; count >>= 7) to->push_back(static_cast<char>(count | 0x80));
  to->push_back(static_cast<char>(count));
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

// A bit for each element: whether it has changed.
template <size_t kWidth>
std::vector<uint64_t> FindChanged(absl::Span<const std::byte> before, absl::Span<const std::byte> after) {
  constexpr size_t kInWord = 8 / kWidth;
  const size_t elements = before.size() / kWidth;
  std::vector<uint64_t> changed((elements + 63) / 64);
  const auto look = [&](size_t i) {
    const bool differs = CodeAt<kWidth>(before.data(), i) != CodeAt<kWidth>(after.data(), i);
    changed[i / 64] |= uint64_t{differs} << (i % 64);
  };
  size_t i = 0;
  for (; i + kInWord <= elements; i += kInWord) {
    if (CodeAt<8>(before.data() + i * kWidth, 0) == CodeAt<8>(after.data() + i * kWidth, 0)) continue;
    for (size_t k = i; k < i + kInWord; ++k) look(k);
  }
  for (; i < elements; ++i) look(i);
  return changed;
}

// Calls `each` with the index of every bit that is set, in order.
template <typename Each>
void ForEachBit(const std::vector<uint64_t>& bits, const Each& each) {
  for (size_t word = 0; word < bits.size(); ++word) {
    for (uint64_t left = bits[word]; left != 0; left &= left - 1) {
      each(word * 64 + static_cast<size_t>(std::countr_zero(left)));
    }
  }
}

// Calls `each` with every run of bits that are set: the unset ones before it, and its length.
template <typename Each>
void ForEachRun(const std::vector<uint64_t>& bits, const Each& each) {
  uint64_t begin = 0, end = 0, past = 0;  // of the run in hand, and where the one before it ended
  ForEachBit(bits, [&](uint64_t i) {
    if (i == end && end > begin) return void(++end);
    if (end > begin) each(begin - past, end - begin);
    if (end > begin) past = end;
    begin = i;
    end = i + 1;
  });
  if (end > begin) each(begin - past, end - begin);
}

// What each coding takes.
struct Sizes {
  uint64_t gaps = 0, runs = 0, differences = 0;
};

template <size_t kWidth>
Sizes SizesOf(const std::vector<uint64_t>& changed, const std::byte* before, const std::byte* after) {
  Sizes sizes;
  uint64_t past = 0;
  ForEachBit(changed, [&](uint64_t i) {
    sizes.gaps += CountBytes(i - past);
    past = i + 1;
    sizes.differences += CountBytes(Difference<kWidth>(CodeAt<kWidth>(before, i), CodeAt<kWidth>(after, i)));
  });
  ForEachRun(changed,
             [&](uint64_t skipped, uint64_t length) { sizes.runs += CountBytes(skipped) + CountBytes(length - 1); });
  return sizes;
}

void PutPositions(const std::vector<uint64_t>& changed, uint64_t elements, Changes* changes) {
  std::string& to = changes->positions;
  uint64_t past = 0;
  switch (changes->position_coding) {
    case PositionCoding::kAll:
      break;
    case PositionCoding::kBitmap:
      to.assign(reinterpret_cast<const char*>(changed.data()), (elements + 7) / 8);
      break;
    case PositionCoding::kGaps:
      ForEachBit(changed, [&](uint64_t i) {
        PutCount(i - past, &to);
        past = i + 1;
      });
      break;
    case PositionCoding::kRuns:
      ForEachRun(changed, [&](uint64_t skipped, uint64_t length) {
        PutCount(skipped, &to);
        PutCount(length - 1, &to);
      });
  }
}

template <size_t kWidth>
void PutValues(const std::vector<uint64_t>& changed, const std::byte* before, const std::byte* after,
               Changes* changes) {
  ForEachBit(changed, [&](uint64_t i) {
    if (changes->value_coding == ValueCoding::kCodes) {
      changes->values.append(reinterpret_cast<const char*>(after) + i * kWidth, kWidth);
    } else {
      PutCount(Difference<kWidth>(CodeAt<kWidth>(before, i), CodeAt<kWidth>(after, i)), &changes->values);
    }
  });
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
  const std::vector<uint64_t> changed = FindChanged<kWidth>(before, after);
  FoundChanges found;
  for (const uint64_t word : changed) found.count += static_cast<uint64_t>(std::popcount(word));
  if (found.count > most_bytes) return found;  // a value takes a byte at least
  if (found.count == 0) return {.changes = Changes{}};
  const Sizes sizes = SizesOf<kWidth>(changed, before.data(), after.data());
  const uint64_t bitmap = (before.size() / kWidth + 7) / 8, codes = found.count * kWidth;
  Changes changes{.position_coding = sizes.runs < sizes.gaps ? PositionCoding::kRuns : PositionCoding::kGaps,
                  .value_coding = sizes.differences < codes ? ValueCoding::kDifferences : ValueCoding::kCodes,
                  .count = found.count};
  if (bitmap < std::min(sizes.gaps, sizes.runs)) changes.position_coding = PositionCoding::kBitmap;
  const uint64_t positions = std::min({bitmap, sizes.gaps, sizes.runs}), values = std::min(sizes.differences, codes);
  if (positions + values > most_bytes) return found;
  changes.positions.reserve(positions);
  changes.values.reserve(values);
  PutPositions(changed, before.size() / kWidth, &changes);
  PutValues<kWidth>(changed, before.data(), after.data(), &changes);
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
