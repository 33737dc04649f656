#include "client/python/core/numerics_digest.h"

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "proto/checksum.h"

#include "kernels/registry.h"

namespace ballast {
namespace {

constexpr uint64_t kPieceElements = 64 * kernels::kTile;
constexpr uint64_t kAlignment = 64;

template <typename Values>
absl::Span<const std::byte> BytesOf(const Values& values) {
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(*values.data())};
}

// Room for so many elements of a master.
class MasterRoom {
 public:
  MasterRoom(const kernels::MasterFormat& master, uint64_t elements) {
    uint64_t end = 0;
    std::array<uint64_t, kernels::kMaxPlanes> offsets = {};
    for (size_t p = 0; p < master.planes.size(); ++p) {
      offsets[p] = end;
      end += (kernels::PlaneBytes(master.planes[p], elements) + kAlignment - 1) / kAlignment * kAlignment;
    }
    memory_.resize(end + kAlignment);
    auto* first = memory_.data();
    first += (kAlignment - reinterpret_cast<uintptr_t>(first) % kAlignment) % kAlignment;
    for (size_t p = 0; p < master.planes.size(); ++p) planes_[p] = first + offsets[p];
  }
  std::byte* const* planes() const { return planes_.data(); }

 private:
  std::vector<std::byte> memory_;
  std::array<std::byte*, kernels::kMaxPlanes> planes_ = {};
};

struct Formats {
  const kernels::MasterFormat* master = nullptr;
  kernels::WireIndex loaded = -1, served = -1;
  const kernels::WireFormat& of_loaded() const { return kernels::WireFormats()[static_cast<size_t>(loaded)]; }
  const kernels::WireFormat& of_served() const { return kernels::WireFormats()[static_cast<size_t>(served)]; }
};

std::optional<Formats> Find(const ServedAs& tensor) {
  const Formats formats{.master = kernels::FindMasterFormat(tensor.master),
                        .loaded = kernels::FindWireFormat(tensor.format),
                        .served = kernels::FindWireFormat(tensor.serving)};
  if (formats.master == nullptr || formats.loaded < 0 || formats.served < 0) return std::nullopt;
  if (!formats.of_loaded().gradient || !formats.of_served().serving) return std::nullopt;
  return formats;
}

std::optional<uint64_t> DigestInPieces(const Formats& formats, uint64_t elements, const std::byte* weights) {
  const MasterRoom room(*formats.master, std::min(elements, kPieceElements));
  std::vector<std::byte> codes;
  WeightDigester digester;
  for (uint64_t first = 0; first < elements; first += kPieceElements) {
    const uint64_t n = std::min(elements - first, kPieceElements);
    const std::byte* const in = weights + first * formats.of_loaded().bytes;
    if (!formats.master->load(room.planes(), formats.loaded, in, 0, n)) return std::nullopt;
    codes.resize(n * formats.of_served().bytes);
    formats.master->encode_weights(room.planes(), formats.served, nullptr, 0, codes.data(), 0, n);
    digester.Add(codes);
  }
  return digester.Digest();
}

std::optional<uint64_t> DigestWithScales(const Formats& formats, uint64_t elements, uint64_t row_length,
                                         const std::byte* weights) {
  const MasterRoom room(*formats.master, elements);
  if (!formats.master->load(room.planes(), formats.loaded, weights, 0, elements)) return std::nullopt;
  std::vector<float> scales;
  for (uint64_t first = 0; first < elements; first += row_length) {
    scales.push_back(formats.master->absmax(room.planes(), first, first + row_length));
  }
  std::vector<std::byte> codes(elements * formats.of_served().bytes);
  formats.master->encode_weights(room.planes(), formats.served, scales.data(), row_length, codes.data(), 0, elements);
  return ScaledDigest(WeightDigest(codes), WeightDigest(BytesOf(scales)));
}

}  // namespace

std::optional<uint64_t> ServedDigest(const ServedAs& tensor, const std::byte* weights) {
  const auto formats = Find(tensor);
  if (!formats) return std::nullopt;
  const kernels::Scaling scaling = formats->of_served().scaling;
  if (scaling == kernels::Scaling::kNone) return DigestInPieces(*formats, tensor.elements, weights);
  const bool rows = scaling == kernels::Scaling::kRow && tensor.columns > 1;
  return DigestWithScales(*formats, tensor.elements, rows ? tensor.columns : tensor.elements, weights);
}

}  // namespace ballast
