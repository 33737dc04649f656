// Gradients of ranks, summed and measured on both sides.
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "tests/kernels/adversarial.h"
#include "tests/kernels/cuda/gpu_identity.h"
#include "tests/kernels/tensor.h"

namespace ballast::kernels {
namespace {

constexpr std::byte kJunk{0xff};

const WireFormat& Wire(WireIndex format) { return WireFormats()[static_cast<size_t>(format)]; }

// A payload's numbers, by the oracle.
std::vector<float> Decoded(const Payload& payload) {
  const uint64_t bytes = Wire(payload.format).bytes;
  std::vector<float> values(payload.bytes.size() / bytes);
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t code = 0;
    std::memcpy(&code, payload.bytes.data() + i * bytes, bytes);
    values[i] =
        bytes == 4
            ? std::bit_cast<float>(code)
            : static_cast<float>(oracle::ValueOf(code, *FloatOf(Wire(payload.format)), static_cast<int>(bytes) * 8));
  }
  return values;
}

// Sums of several ranks in two launches, each of the parts before and after the last tile's begin; the part behind has no
// terms in the second launch. And the first rank's alone, copied.
void CompareSum(WireIndex format, uint64_t n, const Stream& stream, Findings* findings) {
  constexpr uint64_t kRanks = 4;
  const std::string title = std::string("the sum of gradients in ") + NameOf(format);
  const uint64_t bytes = Wire(format).bytes, parted = (n - 1) / kTile * kTile;
  std::vector<DeviceArray> payloads;
  std::vector<const std::byte*> terms;  // of the part before, of the one behind
  std::vector<float> wanted(n);
  std::vector<std::byte> first;
  for (uint64_t rank = 0; rank < kRanks; ++rank) {
    Payload payload = Encoded(format, rank % 2 == 0 ? Finite(Adversarial(rank, n)) : Normals(rank).Vector(n, 1e-3));
    const std::vector<float> values = Decoded(payload);
    for (uint64_t i = 0; i < n; ++i) {
      if (rank < 2 || i < parted) wanted[i] = rank == 0 ? values[i] : wanted[i] + values[i];
    }
    if (rank == 0) first = payload.bytes;
    payload.bytes.resize(PaddedElements(n) * bytes, kJunk);
    payloads.push_back(Uploaded(payload.bytes, stream));
    terms.push_back(payloads.back().data());
  }
  for (uint64_t rank = 0; rank < 2; ++rank) terms.push_back(terms[rank] + parted * bytes);
  const DeviceArray at = Uploaded(terms, stream);
  DeviceArray sum(PaddedElements(n) * sizeof(float)), copy(PaddedElements(n) * bytes);
  sum.Fill(kJunk, stream);
  const auto launch = [&](std::vector<DeviceSum> batch) {
    uint64_t tiles = 0;
    for (DeviceSum& item : batch) item.first_tile = std::exchange(tiles, tiles + kernels::TilesOf(item.n));
    const DeviceArray on_device = Uploaded(batch, stream);
    Check(CudaSum(on_device.as<DeviceSum>(), static_cast<int>(batch.size()), tiles, stream.get()), title);
    stream.Wait(title);
  };
  const auto* const listed = at.as<const std::byte*>();
  DeviceSum before{
      .to = sum.data(), .n = parted, .terms = listed, .term_count = 2, .format = format, .adds = true, .first = true};
  DeviceSum behind = before, alone = before;
  behind.to = sum.data() + parted * sizeof(float), behind.n = n - parted, behind.terms = listed + kRanks;
  alone.to = copy.data(), alone.n = n, alone.term_count = 1, alone.adds = false;
  launch({before, behind, alone});
  before.terms = listed + 2, before.first = behind.first = false, behind.term_count = 0;
  launch({before, behind});
  std::vector<float> got(n);
  sum.Download(got.data(), n * sizeof(float), stream);
  const auto where = [&](uint64_t i) {
    return title + ", " + std::to_string(n) + " elements, element " + std::to_string(i);
  };
  findings->Same(reinterpret_cast<const std::byte*>(wanted.data()), reinterpret_cast<const std::byte*>(got.data()),
                 n * sizeof(float), sizeof(float), where);
  std::vector<std::byte> copied(n * bytes);
  copy.Download(copied.data(), copied.size(), stream);
  findings->Same(first.data(), copied.data(), copied.size(), bytes, where);
  findings->Compared(n * (kRanks + 1));
}

// A batch of gradients of all formats and these sizes; past each one's end all bits are set: NaN.
void CompareMeasures(std::span<const uint64_t> sizes, bool adversarial, const Stream& stream, Findings* findings) {
  std::vector<DeviceArray> payloads;
  std::vector<DeviceGradient> batch;
  std::vector<TileStatistics> wanted;
  uint64_t seed = 0;
  for (const WireIndex format : GradientFormats()) {
    for (const uint64_t n : sizes) {
      Payload payload = Encoded(format, adversarial ? Adversarial(++seed, n) : Normals(++seed).Vector(n, 1e-3));
      payload.bytes.resize(std::max<uint64_t>(PaddedElements(n), 1) * Wire(format).bytes, kJunk);
      payloads.push_back(Uploaded(payload.bytes, stream));
      batch.push_back({payloads.back().data(), format, 1.0f / 3, n, wanted.size(), nullptr});
      const uint64_t tiles = kernels::TilesOf(n);
      wanted.resize(wanted.size() + tiles);
      Wire(format).measure(payload.bytes.data(), n, 1.0f / 3, 0, tiles, wanted.data() + wanted.size() - tiles);
      findings->Compared(n);
    }
  }
  DeviceArray tiles(wanted.size() * sizeof(TileStatistics));
  tiles.Fill(kJunk, stream);
  for (DeviceGradient& one : batch) one.tiles = tiles.as<TileStatistics>() + one.first_tile;
  const DeviceArray device_batch = Uploaded(batch, stream);
  Check(CudaMeasure(device_batch.as<DeviceGradient>(), static_cast<int>(batch.size()), wanted.size(), stream.get()),
        "measuring");
  std::vector<TileStatistics> got(wanted.size());
  tiles.Download(got.data(), got.size() * sizeof(TileStatistics), stream);
  stream.Wait("measuring");
  findings->Same(reinterpret_cast<const std::byte*>(wanted.data()), reinterpret_cast<const std::byte*>(got.data()),
                 got.size() * sizeof(TileStatistics), 4, [&](uint64_t word) {
                   const uint64_t fields = sizeof(TileStatistics) / 4;
                   return std::string("measuring, ") + (adversarial ? "adversarial" : "ordinary") + ", tile " +
                          std::to_string(word / fields) + ", field " + std::to_string(word % fields);
                 });
}

}  // namespace

void CompareSums(const Extent& extent, const Stream& stream, Findings* findings) {
  for (const WireIndex format : GradientFormats()) {
    for (const uint64_t n : {uint64_t{1}, uint64_t{256}, uint64_t{extent.reduced ? 5001u : 1000003u}}) {
      CompareSum(format, n, stream, findings);
    }
  }
}

void CompareMeasures(const Extent& extent, const Stream& stream, Findings* findings) {
  const uint64_t sizes[] = {1, 0, 31, 257, 4096, 4097, extent.reduced ? 5001u : 1000003u};
  for (const bool adversarial : {false, true}) CompareMeasures(sizes, adversarial, stream, findings);
}

}  // namespace ballast::kernels
