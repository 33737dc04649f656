// Curvature probes: a batch of tensors of all kernels that share a state format, probed on both sides.
#include <bit>
#include <cmath>
#include <deque>

#include "tests/kernels/adversarial.h"
#include "tests/kernels/cuda/gpu_identity.h"
#include "tests/kernels/probe.h"

namespace ballast::kernels {
namespace {

constexpr std::byte kJunk{0xff};

// A tensor after an update, with what is kept of its gradient on both sides.
struct Probed {
  Probed(const Kernel& k, uint64_t n, const Payload& grad)
      : kernel(k), tensor(k, n), kept(n), device_kept(kept.elements() * sizeof(float)) {
    tensor.Step(grad, {.t = 1});
  }
  const Kernel& kernel;
  Tensor tensor;
  Kept kept;
  DeviceArray device_kept;
  std::vector<DeviceArray> planes;
};

// With room for whole rows, which is junk.
Payload Roomy(WireIndex format, const std::vector<float>& values) {
  Payload payload = Encoded(format, values);
  payload.bytes.resize(PaddedElements(values.size()) * WireFormats()[static_cast<size_t>(format)].bytes, kJunk);
  return payload;
}

// The bits of a NaN, which is a sum in which infinities cancel, are each device's own.
void SetNan(float* x) {
  if (std::isnan(*x)) *x = std::bit_cast<float>(0x7fc00000u);
}
std::vector<TileCurvature> WithOneNan(std::vector<TileCurvature> tiles) {
  for (TileCurvature& tile : tiles) SetNan(&tile.u_dg), SetNan(&tile.u_pu);
  return tiles;
}

void CompareKept(Probed& one, const std::string& title, const Stream& stream, Findings* findings) {
  const auto kept = Downloaded<float>(one.device_kept, stream);
  findings->Same(reinterpret_cast<const std::byte*>(one.kept.data()), reinterpret_cast<const std::byte*>(kept.data()),
                 kept.size() * sizeof(float), sizeof(float), [&](uint64_t i) {
                   return title + ", " + NameOf(one.kernel) + ", kept gradient " + std::to_string(i) + " of " +
                          std::to_string(one.tensor.size()) + " elements";
                 });
}

// One probe of every tensor.
void CompareProbe(std::deque<Probed>* tensors, bool adversarial, uint64_t t, const Stream& stream, Findings* findings) {
  const std::string title = std::string("probe ") + std::to_string(t) + (adversarial ? " adversarial" : " ordinary");
  std::vector<DeviceArray> gradients;
  std::vector<DeviceCurvature> batch;
  std::vector<TileCurvature> wanted;
  uint64_t seed = 100 * t;
  for (Probed& one : *tensors) {
    const uint64_t n = one.tensor.size();
    const WireIndex format = GradientFormats()[batch.size() % GradientFormats().size()];
    const Payload grad = Roomy(format, adversarial ? Adversarial(++seed, n) : Normals(++seed).Vector(n, 1e-3));
    const StepOptions options{.t = 1, .grad_scale = 1.0f / 3, .clip = batch.size() % 2 == 0 ? 1.0f : 0.3f};
    CurvatureProbe probe = MakeProbe(one.kernel, &one.tensor, grad, options, &one.kept);
    const uint64_t tiles = SampledTiles(n), first_tile = wanted.size();
    wanted.resize(first_tile + tiles);
    one.kernel.curvature(probe, 0, tiles, &wanted[first_tile]);
    const std::byte* planes[kMaxPlanes] = {};
    for (size_t p = 0; p < one.planes.size(); ++p) planes[p] = one.planes[p].data();
    const CurvatureProbe on_device = ProbeOf(one.kernel, planes);
    std::copy_n(on_device.momentum, 2, probe.momentum);
    std::copy_n(on_device.variance, 2, probe.variance);
    gradients.push_back(Uploaded(grad.bytes, stream));
    probe.grad = gradients.back().data();
    probe.before = one.device_kept.as<float>();
    batch.push_back({.probe = probe, .first_tile = first_tile, .tiles = nullptr});
    findings->Compared(SampledElements(n));
  }
  DeviceArray tiles(wanted.size() * sizeof(TileCurvature));
  tiles.Fill(kJunk, stream);
  for (DeviceCurvature& item : batch) item.tiles = tiles.as<TileCurvature>() + item.first_tile;
  const DeviceArray device_batch = Uploaded(batch, stream);
  const auto kernel = static_cast<size_t>(&tensors->front().kernel - Kernels().data());
  Check(CudaKernels()[kernel].curvature(device_batch.as<DeviceCurvature>(), static_cast<int>(batch.size()),
                                        wanted.size(), stream.get()),
        title);
  wanted = WithOneNan(wanted);
  const std::vector<TileCurvature> got = WithOneNan(Downloaded<TileCurvature>(tiles, stream));
  findings->Same(reinterpret_cast<const std::byte*>(wanted.data()), reinterpret_cast<const std::byte*>(got.data()),
                 wanted.size() * sizeof(TileCurvature), 4, [&](uint64_t word) {
                   const uint64_t fields = sizeof(TileCurvature) / 4;
                   return title + ", state " + tensors->front().kernel.state + ", sampled tile " +
                          std::to_string(word / fields) + ", field " + std::to_string(word % fields);
                 });
  for (Probed& one : *tensors) CompareKept(one, title, stream, findings);
}

}  // namespace

void CompareProbes(const Extent& extent, const Stream& stream, Findings* findings) {
  const std::vector<uint64_t> few = {1, 257, 4097}, all = {1, 31, 257, 4096, 4097, 65536, 65537, 200003};
  for (const MomentFormat& state : MomentFormats()) {
    for (const bool adversarial : {false, true}) {
      std::deque<Probed> tensors;
      for (size_t k = 0; k < Kernels().size(); ++k) {
        const Kernel& kernel = Kernels()[k];
        findings->Expect((kernel.curvature == nullptr) == (CudaKernels()[k].curvature == nullptr),
                         "whether there is a probe of " + NameOf(kernel));
        if (kernel.curvature == nullptr || kernel.state != std::string(state.name)) continue;
        for (const uint64_t n : extent.reduced ? few : all) {
          const auto values = adversarial ? Adversarial(n, n) : Normals(n).Vector(n, 1e-3);
          Probed& one = tensors.emplace_back(kernel, n, Encoded(FindWireFormat("fp32"), values));
          for (size_t p = 0; p < kernel.planes.size(); ++p) {
            const std::byte* at = one.tensor.plane(p);
            one.planes.push_back(Uploaded(std::vector<std::byte>(at, at + PlaneBytes(kernel.planes[p], n)), stream));
          }
        }
      }
      if (tensors.empty()) continue;
      for (uint64_t t = 1; t <= 3; ++t) CompareProbe(&tensors, adversarial, t, stream, findings);
    }
  }
}

}  // namespace ballast::kernels
