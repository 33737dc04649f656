#include "proto/checksum.h"

#include <isa-l/crc.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace ballast {

uint32_t Crc32c(absl::Span<const std::byte> bytes) { return ExtendCrc32c(0, bytes); }

uint32_t ExtendCrc32c(uint32_t crc, absl::Span<const std::byte> bytes) {
  // isa-l takes an int length and a non-const pointer that it does not write through.
  constexpr size_t kMost = size_t{1} << 30;
  crc = ~crc;
  while (!bytes.empty()) {
    const auto piece = bytes.subspan(0, std::min(bytes.size(), kMost));
    auto* data = reinterpret_cast<unsigned char*>(const_cast<std::byte*>(piece.data()));
    crc = crc32_iscsi(data, static_cast<int>(piece.size()), crc);
    bytes.remove_prefix(piece.size());
  }
  return ~crc;
}

uint32_t CopyCrc32c(std::byte* to, absl::Span<const std::byte> bytes) {
  constexpr size_t kNear = 16 << 10;  // stays in the nearest cache
  uint32_t crc = 0;
  while (!bytes.empty()) {
    const auto piece = bytes.subspan(0, std::min(bytes.size(), kNear));
    crc = ExtendCrc32c(crc, piece);
    std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
    bytes.remove_prefix(piece.size());
  }
  return crc;
}

uint64_t WeightDigest(absl::Span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

uint64_t ScaledDigest(uint64_t of_codes, uint64_t of_scales) {
  const std::array<uint64_t, 2> both = {of_codes, of_scales};
  return WeightDigest(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(both.data()), sizeof(both)));
}

struct WeightDigester::State {
  XXH3_state_t* xxh = XXH3_createState();
};

WeightDigester::WeightDigester() : state_(std::make_unique<State>()) { XXH3_64bits_reset(state_->xxh); }
WeightDigester::~WeightDigester() { XXH3_freeState(state_->xxh); }
void WeightDigester::Add(absl::Span<const std::byte> piece) {
  XXH3_64bits_update(state_->xxh, piece.data(), piece.size());
}
uint64_t WeightDigester::Digest() const { return XXH3_64bits_digest(state_->xxh); }

uint64_t NameKey(std::string_view name, uint64_t seed) { return XXH3_64bits_withSeed(name.data(), name.size(), seed); }

}  // namespace ballast
