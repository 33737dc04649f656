// Changes of weights, as a reader takes them from a daemon that may send anything: what is refused says why, what is
// accepted changes as many elements as it says at most, and nothing beside the chunk. And as a daemon makes them: from any
// codes to any others, they come out as these, in as many bytes as were said, and in no more than were allowed.
//
// A libFuzzer target (LLVMFuzzerTestOneInput); random_inputs.cc drives it where there is no clang.
#include <cstring>
#include <vector>

#include "proto/changes.h"

#include "tests/fuzz/input.h"
#include "tests/fuzz/require.h"

namespace ballast::fuzz {
namespace {

// On the heap, and not a byte longer than it is: the address sanitizer sees what lies beside it.
using Chunk = std::vector<std::byte>;

Chunk TakeChunk(Input* in, size_t bytes) {
  Chunk chunk(bytes);
  const uint32_t levels = 1 + in->Below(4);  // few codes, so that some stay as they are
  for (std::byte& b : chunk) b = static_cast<std::byte>(in->Take<uint8_t>() % (64 * levels));
  return chunk;
}

uint64_t Differing(const Chunk& a, const Chunk& b, size_t width) {
  uint64_t differing = 0;
  for (size_t i = 0; i < a.size(); i += width) differing += std::memcmp(a.data() + i, b.data() + i, width) != 0;
  return differing;
}

ChangesView ViewOf(const Changes& c) { return {c.position_coding, c.value_coding, c.count, c.positions, c.values}; }

void MakeAndApply(const Chunk& before, const Chunk& after, size_t width, uint64_t most_bytes) {
  const uint64_t differing = Differing(before, after, width);
  const FoundChanges all = FindChanges(before, after, width, ~uint64_t{0});
  Require(all.count == differing, "the number of changed elements is wrong");
  Require(all.changes.has_value() && all.changes->count == differing, "changes without a limit are not there");
  Chunk made = before;
  Require(ApplyChanges(ViewOf(*all.changes), width, absl::MakeSpan(made)).ok(), "our own changes are refused");
  Require(made == after, "our own changes give other codes");
  const FoundChanges some = FindChanges(before, after, width, most_bytes);
  Require(some.changes.has_value() == (all.changes->bytes() <= most_bytes), "the limit is not kept");
}

void ApplyWhatever(Input* in, const Chunk& before, size_t width) {
  const auto position_coding = static_cast<PositionCoding>(in->Below(4));
  const auto value_coding = static_cast<ValueCoding>(in->Below(2));
  const uint64_t count = in->Below(8) == 0 ? in->Take<uint64_t>() : in->Below(64);
  const size_t positions = in->Below(64);
  const std::string rest = in->Rest();
  const absl::string_view all = rest;
  const ChangesView changes{position_coding, value_coding, count, all.substr(0, positions),
                            all.substr(std::min(positions, all.size()))};
  Chunk after = before;
  const absl::Status applied = ApplyChanges(changes, width, absl::MakeSpan(after));
  if (!applied.ok()) return RequireSaid(applied);
  Require(count * width <= before.size(), "there are more changes than elements");
  Require(Differing(before, after, width) <= count, "more elements have changed than were said to");
  MakeAndApply(before, after, width, changes.positions.size() + changes.values.size());
}

void RunOne(Input in) {
  const size_t width = size_t{1} << in.Below(3);
  const size_t bytes = (1 + in.Below(80)) * width;
  const bool ours = in.Below(2) == 0;
  const auto most_bytes = in.Take<uint8_t>();
  const Chunk before = TakeChunk(&in, bytes);
  ours ? MakeAndApply(before, TakeChunk(&in, bytes), width, most_bytes) : ApplyWhatever(&in, before, width);
}

}  // namespace
}  // namespace ballast::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ballast::fuzz::RunOne({data, size});
  return 0;
}
