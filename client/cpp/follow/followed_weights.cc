#include "client/cpp/follow/followed_weights.h"

#include <google/protobuf/util/message_differencer.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/changes.h"
#include "proto/checksum.h"

#include "client/cpp/follow/incoming_version.h"

namespace ballast {
namespace {

constexpr uint64_t kMostElements = uint64_t{1} << 40;  // of a tensor
constexpr uint64_t kAlignment = 64;                    // of a tensor's codes

// Sizes are computed from it.
absl::Status CheckShapes(const v1::RunSpec& spec) {
  for (const v1::TensorSpec& tensor : spec.tensors()) {
    uint64_t elements = 1;
    for (const int64_t extent : tensor.shape()) {
      if (extent < 1 || static_cast<uint64_t>(extent) > kMostElements / elements) {
        return absl::InternalError(absl::StrCat("the daemon says that tensor '", tensor.name(),
                                                "' has a shape that no run can have, with an extent of ", extent));
      }
      elements *= static_cast<uint64_t>(extent);
    }
  }
  return absl::OkStatus();
}

bool SameAsServed(const v1::RunSpec& a, const v1::RunSpec& b, int i) {
  const v1::TensorSpec &one = a.tensors(i), &other = b.tensors(i);
  return one.name() == other.name() && one.dtype() == other.dtype() &&
         std::equal(one.shape().begin(), one.shape().end(), other.shape().begin(), other.shape().end()) &&
         ServingFormat(a, one) == ServingFormat(b, other);
}

}  // namespace

absl::StatusOr<FollowedWeights> FollowedWeights::Create(const v1::RunSpec& spec, uint64_t chunk_elements) {
  if (auto s = CheckShapes(spec); !s.ok()) return s;
  auto tensors = TensorTable::Create(spec, chunk_elements);
  if (!tensors.ok()) return tensors.status();
  FollowedWeights weights;
  weights.spec_ = spec;
  weights.tensors_ = *std::move(tensors);
  uint64_t end = 0;
  for (uint32_t i = 0; i < weights.tensors_.size(); ++i) {
    const WireTensor& tensor = weights.tensors_[i];
    weights.places_.push_back({.begin = end, .scales = std::vector<float>(tensor.scales())});
    end += (tensor.served_bytes() + kAlignment - 1) / kAlignment * kAlignment;
    weights.bytes_ += tensor.served_bytes() + tensor.scales() * sizeof(float);
  }
  weights.codes_.reset(new (std::nothrow) std::byte[end]);
  if (weights.codes_ == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("the weights of run '", spec.run_id(), "' take ", end,
                                                     " bytes of memory, which are not to be had"));
  }
  weights.Forget();
  return weights;
}

absl::Span<const std::byte> FollowedWeights::codes(uint32_t tensor) const {
  return {codes_.get() + places_[tensor].begin, tensors_[tensor].served_bytes()};
}

uint64_t FollowedWeights::read_bytes(uint32_t tensor) const {
  return tensors_[tensor].elements * FormatBytes(tensors_[tensor].dtype);
}

absl::Status FollowedWeights::Read(uint32_t tensor, std::byte* out) const {
  const WireTensor& wire = tensors_[tensor];
  if (wire.serving == wire.dtype) {
    std::memcpy(out, codes(tensor).data(), codes(tensor).size());
    return absl::OkStatus();
  }
  return DecodeWeights(
      {.format = wire.serving, .row_length = wire.row_length, .codes = codes(tensor), .scales = scales(tensor)},
      wire.dtype, out);
}

absl::Status FollowedWeights::Read(uint32_t tensor, absl::Span<const int64_t> places, std::byte* out) const {
  const WireTensor& wire = tensors_[tensor];
  const uint64_t width = wire.serving_element_bytes;
  const bool as_served = wire.serving == wire.dtype;
  std::vector<std::byte> gathered(as_served ? 0 : places.size() * width);
  std::byte* to = as_served ? out : gathered.data();
  std::vector<float> scales;  // of each, as if it were a row
  for (const int64_t place : places) {
    std::memcpy(to, codes(tensor).data() + static_cast<uint64_t>(place) * width, width);
    to += width;
    if (wire.row_length > 0) scales.push_back(places_[tensor].scales[static_cast<uint64_t>(place) / wire.row_length]);
  }
  if (as_served) return absl::OkStatus();
  return DecodeWeights(
      {.format = wire.serving, .row_length = wire.row_length > 0 ? 1u : 0u, .codes = gathered, .scales = scales},
      wire.dtype, out);
}

bool FollowedWeights::Fit(const v1::RunSpec& spec, uint64_t chunk_elements) const {
  if (chunk_elements != tensors_.chunk_elements() || spec.tensors_size() != spec_.tensors_size()) return false;
  if (!google::protobuf::util::MessageDifferencer::Equals(spec.part(), spec_.part())) return false;
  for (int i = 0; i < spec.tensors_size(); ++i) {
    if (!SameAsServed(spec, spec_, i)) return false;
  }
  return true;
}

absl::Status FollowedWeights::Apply(const v1::ChangedChunk& chunk) {
  const uint32_t index = chunk.tensor();
  const WireTensor& tensor = tensors_[index];
  const ShardPiece piece = tensors_.PieceOf(index, chunk.chunk());
  const uint64_t width = tensor.serving_element_bytes;
  digests_[index].reset();
  std::byte* const begin = codes_.get() + places_[index].begin + piece.first * width;
  if (auto s = ApplyChanges(ChangesIn(chunk), width, absl::MakeSpan(begin, piece.size() * width)); !s.ok()) {
    return absl::Status(s.code(), absl::StrCat(tensors_.Name(index), ", chunk ", chunk.chunk(), ": ", s.message()));
  }
  if (!chunk.scales().empty()) {
    const auto first = static_cast<std::ptrdiff_t>(piece.first / tensor.row_length);
    std::copy(chunk.scales().begin(), chunk.scales().end(), places_[index].scales.begin() + first);
  }
  if (!chunk.last()) return absl::OkStatus();
  if (Digest(index) != chunk.digest()) {
    return absl::DataLossError(absl::StrCat(tensors_.Name(index), " has another digest than the daemon's"));
  }
  digests_[index] = chunk.digest();
  return absl::OkStatus();
}

uint64_t FollowedWeights::Digest(uint32_t tensor) const {
  const uint64_t of_codes = WeightDigest(codes(tensor));
  if (tensors_[tensor].row_length == 0) return of_codes;
  const std::vector<float>& scales = places_[tensor].scales;
  return ScaledDigest(of_codes,
                      WeightDigest({reinterpret_cast<const std::byte*>(scales.data()), scales.size() * sizeof(float)}));
}

}  // namespace ballast
