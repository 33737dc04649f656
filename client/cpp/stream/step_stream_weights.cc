// How weights that arrive come to where they are bound.

#include <algorithm>
#include <new>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/checksum.h"

#include "client/cpp/stream/step_stream.h"
#include "client/cpp/stream/weight_transfer.h"

namespace ballast {
namespace {

// Weights that are copied as fast as the lock is taken a second time.
constexpr size_t kLandedInTurn = 16 << 10;

}  // namespace

absl::Status StepStream::OnSmallWeights(const v1::SmallWeights& weights) {
  absl::Span<const std::byte> left = BytesOf(weights.data());
  v1::Weights one;
  one.set_step(weights.step());
  one.set_last(true);
  for (int i = 0; i < weights.tensors_size(); ++i) {
    const bool whole = i < weights.sizes_size() && i < weights.crc32c_size() && weights.sizes(i) <= left.size();
    if (!whole || weights.tensors(i) >= tensors_.size()) {
      return absl::InternalError(absl::StrCat("the daemon sent small weights in step ", weights.step(), ", the ", i,
                                              "th of tensor ", weights.tensors(i), ", without their bytes"));
    }
    one.set_tensor(weights.tensors(i));
    one.set_format(tensors_[weights.tensors(i)].serving);
    one.set_crc32c(weights.crc32c(i));
    if (auto s = OnWeights(one, left.first(weights.sizes(i))); !s.ok()) return s;
    left.remove_prefix(weights.sizes(i));
  }
  return absl::OkStatus();
}

absl::Status StepStream::OnWeights(const v1::Weights& weights, absl::Span<const std::byte> data, bool on_gpu) {
  const bool intact = on_gpu || Crc32c(data) == weights.crc32c();
  Destination destination;
  std::shared_ptr<OpenStep> step;
  {
    absl::MutexLock lock(&mu_);
    if (!step_ || step_->number() != weights.step()) return absl::OkStatus();  // repeated of a step that is over here
    if (auto s = step_->CheckWeights(weights, data.size()); !s.ok()) return s;
    if (!intact) {
      return absl::DataLossError(absl::StrCat("weights of ", tensors_.Name(weights.tensor()), " in step ",
                                              weights.step(), " arrived damaged (chunk ", weights.chunk(),
                                              ", checksum differs)"));
    }
    destination = bound_[weights.tensor()];
    step = step_;
    if (data.size() <= kLandedInTurn && !on_gpu && !destination.on_gpu && !destination.scales_on_gpu) {
      const absl::Status landed = Land(weights, data, on_gpu, destination);
      if (landed.ok() && step_->Received(weights, data.size())) Progress();
      return landed;
    }
  }
  const absl::Status landed = Land(weights, data, on_gpu, destination);
  if (!landed.ok()) return landed;
  absl::MutexLock lock(&mu_);
  if (step == step_ && step_->Received(weights, data.size())) Progress();
  return absl::OkStatus();
}

absl::Status StepStream::Land(const v1::Weights& weights, absl::Span<const std::byte> data, bool on_gpu,
                              const Destination& destination) const {
  if (destination.weights == nullptr) return absl::OkStatus();
  const bool by_gpu = on_gpu || destination.on_gpu;
  if (!destination.as_served) {
    return by_gpu ? DecodeByGpu(weights, data, on_gpu, destination)
                  : DecodeTo(weights, data, PlaceOf(weights, destination));
  }
  if (auto s = LandScales(weights, destination); !s.ok()) return s;
  std::byte* const place = PlaceOf(weights, destination);
  if (by_gpu) return gpu_->Copy(place, data.data(), data.size());
  std::copy(data.begin(), data.end(), place);
  return absl::OkStatus();
}

std::byte* StepStream::PlaceOf(const v1::Weights& weights, const Destination& destination) const {
  const WireTensor& tensor = tensors_[weights.tensor()];
  const uint64_t at = tensors_.PieceOf(weights.tensor(), weights.chunk()).first - tensor.shard.begin;
  const uint64_t bytes = destination.as_served ? tensor.serving_element_bytes : tensor.landing_element_bytes();
  return destination.weights + at * bytes;
}

absl::Status StepStream::LandScales(const v1::Weights& weights, const Destination& destination) const {
  const WireTensor& tensor = tensors_[weights.tensor()];
  if (destination.scales == nullptr || tensor.row_length == 0) return absl::OkStatus();
  const uint64_t first = tensors_.PieceOf(weights.tensor(), weights.chunk()).first;
  float* const place = destination.scales + first / tensor.row_length - tensor.shard.begin / tensor.row_length;
  const auto& scales = weights.scales();
  if (destination.scales_on_gpu) {
    return gpu_->Copy(place, scales.data(), static_cast<uint64_t>(scales.size()) * sizeof(float));
  }
  std::copy(scales.begin(), scales.end(), place);
  return absl::OkStatus();
}

absl::Status StepStream::DecodeTo(const v1::Weights& weights, absl::Span<const std::byte> codes, std::byte* out) const {
  const uint64_t first = tensors_.PieceOf(weights.tensor(), weights.chunk()).first;
  return Decode({.first = first, .format = weights.format(), .codes = codes, .scales = weights.scales()},
                tensors_[weights.tensor()], out);
}

absl::Status StepStream::DecodeByGpu(const v1::Weights& weights, absl::Span<const std::byte> data, bool on_gpu,
                                     const Destination& destination) const {
  const WireTensor& tensor = tensors_[weights.tensor()];
  std::vector<std::byte> codes, decoded;
  try {
    if (on_gpu) codes.resize(data.size());
    if (destination.on_gpu) decoded.resize(data.size() / tensor.serving_element_bytes * tensor.landing_element_bytes());
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("there is no host memory for weights that are to be decoded");
  }
  if (on_gpu) {
    if (auto s = gpu_->Copy(codes.data(), data.data(), data.size()); !s.ok()) return s;
    data = codes;
  }
  std::byte* const place = PlaceOf(weights, destination);
  if (auto s = DecodeTo(weights, data, destination.on_gpu ? decoded.data() : place); !s.ok()) return s;
  return destination.on_gpu ? gpu_->Copy(place, decoded.data(), decoded.size()) : absl::OkStatus();
}

}  // namespace ballast
