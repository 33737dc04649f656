#include "client/python/core/landing.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ballast {

Landing::Landing(const Places& places) {
  for (const auto& [tensor, address, bytes] : places) places_[tensor] = {address, bytes};
}

std::vector<uint32_t> Landing::tensors() const {
  std::vector<uint32_t> tensors;
  for (const auto& [tensor, place] : places_) tensors.push_back(tensor);
  return tensors;
}

absl::Status Landing::Write(uint32_t tensor, uint64_t offset, absl::Span<const std::byte> piece) const {
  const auto found = places_.find(tensor);
  if (found == places_.end()) return absl::InternalError(absl::StrCat("tensor ", tensor, " was not asked for"));
  const auto [address, bytes] = found->second;
  if (offset + piece.size() > bytes) {
    return absl::InvalidArgumentError(absl::StrCat("pull of tensor ", tensor, ": the daemon serves at least ",
                                                   offset + piece.size(), " bytes, the destination has ", bytes));
  }
  std::copy(piece.begin(), piece.end(), reinterpret_cast<std::byte*>(address) + offset);
  return absl::OkStatus();
}

namespace {

Places CodesOf(const ServedPlaces& places) {
  Places codes;
  for (const auto& [tensor, address, bytes, scales, count] : places) codes.emplace_back(tensor, address, bytes);
  return codes;
}

}  // namespace

ServedLanding::ServedLanding(const ServedPlaces& places) : codes_(CodesOf(places)) {
  for (const auto& [tensor, address, bytes, scales, count] : places) {
    if (count > 0) scales_[tensor] = {.address = scales, .count = count, .row_length = bytes / count};
  }
}

absl::Status ServedLanding::Write(const ServedPiece& piece) const {
  if (auto s = codes_.Write(piece.tensor, piece.first, piece.codes); !s.ok()) return s;  // a code is one byte
  if (piece.scales.empty()) return absl::OkStatus();
  const auto found = scales_.find(piece.tensor);
  const uint64_t first = found == scales_.end() ? 0 : piece.first / found->second.row_length;
  if (found == scales_.end() || first + piece.scales.size() > found->second.count) {
    return absl::InvalidArgumentError(
        absl::StrCat("pull of tensor ", piece.tensor, " in ", piece.format, ": there is no ", "place for its scales"));
  }
  std::copy(piece.scales.begin(), piece.scales.end(), reinterpret_cast<float*>(found->second.address) + first);
  return absl::OkStatus();
}

}  // namespace ballast
