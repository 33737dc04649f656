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

}  // namespace ballast
