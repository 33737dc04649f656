// The two checksums of the wire, for both of its ends: proto/PROTOCOL.md, "Checksums" and "Digests".
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/types/span.h"

namespace ballast {

// CRC-32C (Castagnoli, as in iSCSI) of a payload; 0 for none.
uint32_t Crc32c(absl::Span<const std::byte> bytes);
// Of a payload that begins with what has this CRC-32C and goes on with these bytes.
uint32_t ExtendCrc32c(uint32_t crc, absl::Span<const std::byte> bytes);
// Copies the bytes to where there is room for them, and returns their CRC-32C; reads memory once for both.
uint32_t CopyCrc32c(std::byte* to, absl::Span<const std::byte> bytes);

// xxh3_64 of a tensor's bytes in its serving format.
uint64_t WeightDigest(absl::Span<const std::byte> bytes);

// Of a tensor that is served with scales, from the digests of all its codes and of all its scales.
uint64_t ScaledDigest(uint64_t of_codes, uint64_t of_scales);

// WeightDigest, fed piece by piece.
class WeightDigester {
 public:
  WeightDigester();
  ~WeightDigester();
  void Add(absl::Span<const std::byte> piece);
  uint64_t Digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// xxh3_64(name, seed): the key of a tensor's random bits.
uint64_t NameKey(std::string_view name, uint64_t seed);

}  // namespace ballast
