// Loading, serving and scales; and what must be refused, or is no work at all.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "tests/kernels/adversarial.h"
#include "tests/kernels/cuda/gpu_identity.h"
#include "tests/kernels/tensor.h"

namespace ballast::kernels {
namespace {

struct Piece {
  uint64_t first, last;
};

// The tensor, and pieces of it that begin and end inside rows and tiles.
constexpr uint64_t kElements = 3 * kTile + 1001;
constexpr Piece kHalves[] = {{0, 4128}, {4128, kElements}};
constexpr Piece kPieces[] = {{0, kElements}, {32, 33}, {32, 32}, {4128, 8000}, {kElements / 32 * 32, kElements}};
constexpr std::byte kPoison{0x5a}, kJunk{0xff};

const WireFormat& Wire(WireIndex format) { return WireFormats()[static_cast<size_t>(format)]; }

// A master's planes on both sides.
class MasterTensor {
 public:
  MasterTensor(size_t master, uint64_t n) : MasterTensor(master, n, LayoutOf(MasterFormats()[master], n)) {}

  const MasterFormat& master() const { return MasterFormats()[index_]; }
  const CudaMaster& cuda() const { return CudaMasters()[index_]; }
  std::byte* const* planes() const { return at_; }
  DeviceCopy Copy(const Piece& piece, uint64_t first_tile) const {
    DeviceCopy copy{};
    for (size_t p = 0; p < master().planes.size(); ++p) copy.planes[p] = states_.device() + (at_[p] - states_.host());
    copy.first = piece.first;
    copy.last = piece.last;
    copy.first_tile = first_tile;
    return copy;
  }
  void Upload(const Stream& stream) { states_.Upload(stream); }
  bool Same(const std::string& title, const Stream& stream, Findings* findings) const {
    const std::vector<std::byte> got = states_.Downloaded(stream);
    return findings->Same(states_.host(), got.data(), got.size(), 1, [&](uint64_t byte) {
      const auto offset = [&](size_t p) { return static_cast<uint64_t>(at_[p] - states_.host()); };
      const size_t p = master().planes.size() > 1 && byte >= offset(1) ? 1 : 0;
      return title + ", plane " + std::to_string(p) + " (" + master().planes[p].name + "), byte " +
             std::to_string(byte - offset(p));
    });
  }

 private:
  static Layout LayoutOf(const MasterFormat& master, uint64_t n) {
    Layout layout;
    for (const Plane& plane : master.planes) layout.Add(PlaneBytes(plane, n));
    return layout;
  }
  MasterTensor(size_t master, uint64_t n, const Layout& layout) : index_(master), states_(layout.size(), kPoison) {
    Layout again;
    size_t p = 0;
    for (const Plane& plane : MasterFormats()[master].planes)
      at_[p++] = states_.host() + again.Add(PlaneBytes(plane, n));
  }

  const size_t index_;
  Twin states_;
  std::byte* at_[kMaxPlanes] = {};
};

// Payloads of the pieces, each with room for whole rows.
std::vector<uint64_t> PayloadPlaces(std::span<const Piece> pieces, uint64_t bytes, uint64_t* total) {
  Layout layout;
  std::vector<uint64_t> at;
  for (const Piece& piece : pieces) at.push_back(layout.Add(PaddedElements(piece.last - piece.first) * bytes));
  *total = layout.size();
  return at;
}

uint64_t TilesOf(std::span<const Piece> pieces) {
  uint64_t tiles = 0;
  for (const Piece& piece : pieces) tiles += kernels::TilesOf(piece.last - piece.first);
  return tiles;
}
// One item a piece, without what load, serve and scales need of their own.
std::vector<DeviceCopy> BatchOf(const MasterTensor& tensor, std::span<const Piece> pieces) {
  std::vector<DeviceCopy> batch;
  for (size_t i = 0; i < pieces.size(); ++i) batch.push_back(tensor.Copy(pieces[i], TilesOf(pieces.first(i))));
  return batch;
}

// Both halves in one batch, with a flag of their own each; where `broken`, the second one's last element is infinite.
void CompareLoad(size_t master, WireIndex format, std::vector<float> values, const Stream& stream, Findings* findings) {
  const bool broken = !std::isfinite(values.back());
  const std::string title = std::string("loading ") + MasterFormats()[master].name + " from " + NameOf(format) +
                            (broken ? " with an infinity" : "");
  const Payload payload = Encoded(format, values);
  MasterTensor tensor(master, kElements);
  tensor.Upload(stream);
  uint64_t total = 0;
  const std::vector<uint64_t> places = PayloadPlaces(kHalves, Wire(format).bytes, &total);
  Twin in(total, kJunk);
  const DeviceArray flags = Uploaded(std::vector<uint32_t>(std::size(kHalves), 0), stream);
  std::vector<DeviceCopy> batch = BatchOf(tensor, kHalves);
  std::vector<uint32_t> wanted;
  for (size_t i = 0; i < std::size(kHalves); ++i) {
    const auto [first, last] = kHalves[i];
    const std::byte* from = payload.bytes.data() + first * Wire(format).bytes;
    std::memcpy(in.host() + places[i], from, (last - first) * Wire(format).bytes);
    wanted.push_back(tensor.master().load(tensor.planes(), format, from, first, last) ? 0 : 1);
    batch[i].payload = in.device() + places[i];
    batch[i].refused = flags.as<uint32_t>() + i;
  }
  in.Upload(stream);
  const DeviceArray on_device = Uploaded(batch, stream);
  Check(tensor.cuda().load(on_device.as<DeviceCopy>(), static_cast<int>(batch.size()), TilesOf(kHalves), format,
                           stream.get()),
        title);
  stream.Wait(title);
  findings->Expect(Downloaded<uint32_t>(flags, stream) == wanted, title + ": which pieces are refused");
  findings->Expect(!broken || wanted == std::vector<uint32_t>{0, 1},
                   title + ": the CPU refuses the second piece alone");
  tensor.Same(title, stream, findings);
  findings->Compared(kElements);
}

// The scales of rows of this length, from the CPU, after the GPU's are found equal.
std::vector<float> CompareScales(const MasterTensor& tensor, uint64_t row, const Stream& stream, Findings* findings) {
  const std::string title = std::string("scales of ") + tensor.master().name + ", rows of " + std::to_string(row);
  std::vector<float> scales((kElements + row - 1) / row);
  for (uint64_t r = 0; r < scales.size(); ++r) {
    scales[r] = tensor.master().absmax(tensor.planes(), r * row, std::min((r + 1) * row, kElements));
  }
  const DeviceArray raised = Uploaded(std::vector<float>(scales.size()), stream);
  std::vector<DeviceCopy> batch = BatchOf(tensor, kHalves);
  for (DeviceCopy& item : batch) {
    item.scales = raised.as<float>();
    item.row_length = row;
  }
  const DeviceArray on_device = Uploaded(batch, stream);
  Check(tensor.cuda().raise_scales(on_device.as<DeviceCopy>(), static_cast<int>(batch.size()), TilesOf(kHalves),
                                   stream.get()),
        title);
  const std::vector<float> got = Downloaded<float>(raised, stream);
  findings->Same(reinterpret_cast<const std::byte*>(scales.data()), reinterpret_cast<const std::byte*>(got.data()),
                 scales.size() * sizeof(float), sizeof(float),
                 [&](uint64_t r) { return title + ", row " + std::to_string(r); });
  findings->Compared(kElements);
  return scales;
}

void CompareServing(const MasterTensor& tensor, WireIndex format, uint64_t row, const std::vector<float>& scales,
                    const Stream& stream, Findings* findings) {
  const std::string title =
      std::string("serving ") + tensor.master().name + " as " + NameOf(format) + ", rows of " + std::to_string(row);
  uint64_t total = 0;
  const std::vector<uint64_t> places = PayloadPlaces(kPieces, Wire(format).bytes, &total);
  Twin out(total, kPoison);
  out.Upload(stream);
  const DeviceArray device_scales = Uploaded(scales, stream);
  std::vector<DeviceCopy> batch = BatchOf(tensor, kPieces);
  for (size_t i = 0; i < std::size(kPieces); ++i) {
    const auto [first, last] = kPieces[i];
    tensor.master().encode_weights(tensor.planes(), format, scales.data(), row, out.host() + places[i], first, last);
    batch[i].payload = out.device() + places[i];
    batch[i].scales = device_scales.as<float>();
    batch[i].row_length = row;
  }
  const DeviceArray on_device = Uploaded(batch, stream);
  Check(tensor.cuda().encode_weights(on_device.as<DeviceCopy>(), static_cast<int>(batch.size()), TilesOf(kPieces),
                                     format, stream.get()),
        title);
  const std::vector<std::byte> got = out.Downloaded(stream);
  for (size_t i = 0; i < std::size(kPieces); ++i) {
    const uint64_t n = kPieces[i].last - kPieces[i].first, bytes = Wire(format).bytes;
    findings->Same(out.host() + places[i], got.data() + places[i], n * bytes, bytes, [&](uint64_t e) {
      return title + ", element " + std::to_string(kPieces[i].first + e) + " of the piece that begins at " +
             std::to_string(kPieces[i].first);
    });
    findings->Compared(n);
  }
}

// An average of weights that begins, moves, and moves again, in two pieces of one batch each time.
void CompareAverage(size_t master, const std::vector<float>& values, const Stream& stream, Findings* findings) {
  constexpr double kDecay = 0.99;
  constexpr Piece kTiles[] = {{0, 2 * kTile}, {2 * kTile, kElements}};
  const auto of_average = static_cast<size_t>(&AverageMaster() - MasterFormats().data());
  MasterTensor weights(master, kElements), average(of_average, kElements);
  average.Upload(stream);
  for (const uint64_t step : {1u, 2u, 3u}) {
    std::vector<float> changed = values;
    for (float& x : changed) x *= static_cast<float>(step);
    weights.master().load(weights.planes(), FindWireFormat("fp32"), changed.data(), 0, kElements);
    weights.Upload(stream);
    Average on_host{.n = kElements,
                    .random_key = RandomKey(AverageKey(1, kDecay), step),
                    .pull = static_cast<float>(1 - kDecay),
                    .begins = step == 1};
    Average on_gpu = on_host;
    const DeviceCopy from = weights.Copy(kTiles[0], 0), to = average.Copy(kTiles[0], 0);
    for (size_t p = 0; p < 2; ++p) {
      on_host.weights[p] = weights.planes()[p];
      on_host.planes[p] = average.planes()[p];
      on_gpu.weights[p] = from.planes[p];
      on_gpu.planes[p] = to.planes[p];
    }
    std::vector<DeviceAverage> batch;
    for (const Piece& piece : kTiles) batch.push_back({on_gpu, piece.first, piece.last, piece.first / kTile});
    const DeviceArray on_device = Uploaded(batch, stream);
    const std::string title = std::string("averaging ") + weights.master().name + ", step " + std::to_string(step);
    Check(weights.cuda().average(on_device.as<DeviceAverage>(), static_cast<int>(batch.size()), TilesOf(kTiles),
                                 stream.get()),
          title);
    stream.Wait(title);
    weights.master().average(on_host, 0, kernels::TilesOf(kElements));
    average.Same(title, stream, findings);
    findings->Compared(kElements);
  }
}

void CompareMaster(size_t master, const std::vector<float>& values, std::span<const uint64_t> rows,
                   const Stream& stream, Findings* findings) {
  for (const WireIndex format : GradientFormats()) CompareLoad(master, format, values, stream, findings);
  CompareAverage(master, values, stream, findings);
  MasterTensor tensor(master, kElements);
  tensor.master().load(tensor.planes(), FindWireFormat("fp32"), values.data(), 0, kElements);
  tensor.Upload(stream);
  for (const uint64_t row : rows) {
    const std::vector<float> scales = CompareScales(tensor, row, stream, findings);
    for (size_t wire = 0; wire < WireFormats().size(); ++wire) {
      const WireFormat& format = WireFormats()[wire];
      const bool whole = row == kElements;
      if (!format.serving || (format.scaling != Scaling::kRow && !whole)) continue;
      CompareServing(tensor, static_cast<WireIndex>(wire), row, scales, stream, findings);
    }
  }
}

}  // namespace

void CompareCodecs(const Extent& extent, const Stream& stream, Findings* findings) {
  const std::vector<uint64_t> all = {1, 3, 7, 8, 9, 24, 255, 256, 257, 333, 1149, 4095, 4096, 5000, kElements};
  const std::vector<uint64_t> few = {3, 256, 333, kElements};
  for (size_t m = 0; m < MasterFormats().size(); ++m) {
    CompareMaster(m, Normals(3).Vector(kElements, 1), extent.reduced ? few : all, stream, findings);
    if (!extent.reduced) CompareMaster(m, Finite(Adversarial(9, kElements)), all, stream, findings);
  }
}

void CompareDivisions(const Stream& stream, Findings* findings) {
  const DeviceArray wrong = Uploaded(std::vector<uint32_t>{0}, stream);
  Check(CudaCheckDivisions(wrong.as<uint32_t>(), stream.get()), "the check of divisions");
  const uint32_t count = Downloaded<uint32_t>(wrong, stream)[0];
  findings->Expect(count == 0, "divisions that do not look at their operands: " + std::to_string(count) + " differ");
}

// A refused load stores nothing. No tensors, or tensors without elements, are no work. A format that is not fit for
// what is asked, or that does not exist, is an error before anything is launched.
void CheckRefusals(const Stream& stream, Findings* findings) {
  std::vector<float> values = Normals(4).Vector(kElements, 1);
  for (const float broken : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    values.back() = broken;
    for (size_t m = 0; m < MasterFormats().size(); ++m) {
      for (const WireIndex format : GradientFormats()) CompareLoad(m, format, values, stream, findings);
    }
  }
  const WireIndex fp32 = FindWireFormat("fp32");
  for (size_t k = 0; k < CudaKernels().size(); ++k) {
    if (CudaKernels()[k].update == nullptr) continue;
    findings->Expect(CudaKernels()[k].update(nullptr, 0, 0, false, stream.get()) == cudaSuccess,
                     "an update of no tensors: " + NameOf(Kernels()[k]));
  }
  for (const CudaMaster& master : CudaMasters()) {
    findings->Expect(master.load(nullptr, 0, 0, fp32, stream.get()) == cudaSuccess, "a load of no tensors");
    findings->Expect(master.encode_weights(nullptr, 0, 0, fp32, stream.get()) == cudaSuccess, "serving no tensors");
    findings->Expect(master.raise_scales(nullptr, 0, 0, stream.get()) == cudaSuccess, "scales of no tensors");
    findings->Expect(master.average(nullptr, 0, 0, stream.get()) == cudaSuccess, "averages of no tensors");
    for (const WireIndex wrong : {-1, static_cast<WireIndex>(WireFormats().size()), FindWireFormat("int8-row")}) {
      findings->Expect(master.load(nullptr, 1, 1, wrong, stream.get()) != cudaSuccess, "a load from no fit format");
    }
    for (const WireIndex wrong : {-1, static_cast<WireIndex>(WireFormats().size()), FindWireFormat("fp8-e5m2")}) {
      findings->Expect(master.encode_weights(nullptr, 1, 1, wrong, stream.get()) != cudaSuccess,
                       "serving in no fit format");
    }
  }
  findings->Expect(CudaSum(nullptr, 0, 0, stream.get()) == cudaSuccess, "sums of nothing");
  findings->Expect(CudaMeasure(nullptr, 0, 0, stream.get()) == cudaSuccess, "measuring nothing");
  stream.Wait("what is no work");
}

}  // namespace ballast::kernels
