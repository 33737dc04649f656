#include "tests/server/rpc/reference.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <numeric>

#include "proto/checksum.h"

#include "kernels/matrix/newton_schulz.h"
#include "server/plan/plan.h"
#include "server/spec/carry_over.h"
#include "server/store/parameter_store.h"
#include "tests/server/rpc/wire.h"
#include "tests/server/specs.h"

namespace ballast::testing {
namespace {

constexpr kernels::PlaneKind kKinds[] = {kernels::PlaneKind::kWeights, kernels::PlaneKind::kMomentum,
                                         kernels::PlaneKind::kVariance};

}  // namespace

Reference::Reference(const RunSpec& spec) : spec_(spec), tensors_(spec.tensors.size()) {
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    for (const kernels::Plane& plane : spec_.groups[spec_.tensors[i].group].kernel->planes) {
      tensors_[i].planes.push_back(Allocate(plane, i));
      if (plane.kind == kernels::PlaneKind::kWeights) tensors_[i].master_planes.push_back(tensors_[i].planes.back());
    }
    for (size_t a = 0; a < spec_.averages.size(); ++a) {
      auto& planes = tensors_[i].averages.emplace_back();
      for (const kernels::Plane& plane : kernels::AverageMaster().planes) planes.push_back(Allocate(plane, i));
    }
  }
}

std::byte* Reference::Allocate(const kernels::Plane& plane, uint32_t tensor) {
  auto& storage =
      tensors_[tensor].storage.emplace_back(AlignedPlaneBytes(plane, spec_.tensors[tensor].elements) + kAlignment);
  void* at = storage.data();
  size_t space = storage.size();
  return static_cast<std::byte*>(std::align(kAlignment, space - kAlignment, at, space));
}

void Reference::TakeOver(Reference* past) {
  for (uint32_t i = 0; i < past->tensors_.size(); ++i) {
    const kernels::Kernel &from = *past->spec_.groups[past->spec_.tensors[i].group].kernel,
                          &to = *spec_.groups[spec_.tensors[i].group].kernel;
    const bool same_master = std::string(from.master) == to.master, same_state = std::string(from.state) == to.state;
    if (same_master && same_state) {
      tensors_[i] = std::move(past->tensors_[i]);
      continue;
    }
    tensors_[i].t = past->tensors_[i].t;
    tensors_[i].averaged = past->tensors_[i].averaged;
    for (size_t a = 0; a < spec_.averages.size(); ++a) {
      for (size_t p = 0; p < tensors_[i].averages[a].size(); ++p) {
        std::memcpy(tensors_[i].averages[a][p], past->tensors_[i].averages[a][p],
                    kernels::PlaneBytes(kernels::AverageMaster().planes[p], spec_.tensors[i].elements));
      }
    }
    for (const auto kind : kKinds) {
      if (kind == kernels::PlaneKind::kWeights ? same_master : same_state) {
        CopyPlanes(*past, i, kind);
      } else if (kind == kernels::PlaneKind::kWeights) {
        Load(i, past->Master(i));
      } else if (StateCodec(from, kind) != nullptr) {
        LoadState(i, kind, past->State(i, kind));
      }
    }
  }
}

void Reference::CopyPlanes(const Reference& past, uint32_t tensor, kernels::PlaneKind kind) {
  const std::vector<std::byte*> from = past.PlanesOf(tensor, kind), to = PlanesOf(tensor, kind);
  size_t next = 0;
  for (const kernels::Plane& plane : spec_.groups[spec_.tensors[tensor].group].kernel->planes) {
    if (plane.kind != kind) continue;
    std::memcpy(to[next], from[next], kernels::PlaneBytes(plane, spec_.tensors[tensor].elements));
    ++next;
  }
}

void Reference::Load(uint32_t tensor, const std::vector<float>& weights) {
  const kernels::MasterFormat* master = spec_.groups[spec_.tensors[tensor].group].master;
  master->load(tensors_[tensor].master_planes.data(), kernels::FindWireFormat("fp32"), weights.data(), 0,
               weights.size());
  const std::vector<float> stored = Master(tensor);
  for (const auto& planes : tensors_[tensor].averages) {
    kernels::AverageMaster().load(planes.data(), kernels::FindWireFormat("fp32"), stored.data(), 0, stored.size());
  }
  tensors_[tensor].averaged = false;
}

void Reference::Average(uint32_t tensor, uint64_t step) {
  const TensorSpec& spec = spec_.tensors[tensor];
  Tensor& t = tensors_[tensor];
  for (size_t a = 0; a < t.averages.size(); ++a) {
    kernels::Average average = {};
    std::copy(t.master_planes.begin(), t.master_planes.end(), average.weights);
    std::copy(t.averages[a].begin(), t.averages[a].end(), average.planes);
    average.n = spec.elements;
    average.random_key =
        kernels::RandomKey(kernels::AverageKey(NameKey(spec.name, spec_.seed), spec_.averages[a]), step);
    average.pull = static_cast<float>(1 - spec_.averages[a]);
    average.begins = !t.averaged;
    spec_.groups[spec.group].master->average(average, 0, kernels::TilesOf(spec.elements));
  }
  t.averaged = true;
}

std::vector<float> Reference::Averaged(uint32_t tensor, size_t average) const {
  std::vector<float> values(spec_.tensors[tensor].elements);
  kernels::AverageMaster().encode_weights(tensors_[tensor].averages[average].data(), kernels::FindWireFormat("fp32"),
                                          nullptr, 0, values.data(), 0, values.size());
  return values;
}

std::string Reference::EncodeAverage(uint32_t tensor, size_t average) const {
  return Encode(tensor, kernels::AverageMaster(), tensors_[tensor].averages[average].data());
}

void Reference::Update(uint32_t tensor, uint64_t step, const std::string& gradient, std::optional<double> lr) {
  UpdateBy(tensor, step, {.data = gradient.data(), .format = spec_.tensors[tensor].gradient_format}, lr);
}

void Reference::UpdateBySum(uint32_t tensor, uint64_t step, const std::vector<float>& sum, float scale, float clip,
                            std::optional<double> lr) {
  const kernels::WireIndex fp32 = kernels::FindWireFormat("fp32");
  UpdateBy(tensor, step, {.data = sum.data(), .format = fp32, .scale = scale, .clip = clip}, lr);
}

void Reference::UpdateBy(uint32_t tensor, uint64_t step, const Payload& gradient, std::optional<double> lr) {
  const TensorSpec& spec = spec_.tensors[tensor];
  const GroupSpec& group = spec_.groups[spec.group];
  Tensor& t = tensors_[tensor];
  kernels::Update update = {};
  for (size_t p = 0; p < t.planes.size(); ++p) update.planes[p] = t.planes[p];
  update.grad = gradient.data;
  update.grad_format = gradient.format;
  update.n = spec.elements;
  update.grad_scale = gradient.scale;
  update.clip = gradient.clip;
  update.random_key = kernels::RandomKey(NameKey(spec.name, spec_.seed), step);
  update.stochastic = group.stochastic;
  update.statistics = kernels::StatisticsLevel::kFull;
  std::vector<double> hyper = group.hyper;
  if (lr) hyper[0] = *lr;
  for (size_t h = 0; h < hyper.size(); ++h) {
    const kernels::ScaledBy by = group.kernel->hypers[h].scaled_by;
    if (by == kernels::ScaledBy::kLrScale) hyper[h] *= spec.lr_scale;
    if (by == kernels::ScaledBy::kWdScale) hyper[h] *= spec.wd_scale;
  }
  group.kernel->prepare(hyper, ++t.t, update.constants);
  std::vector<float> direction(kernels::PaddedElements(spec.elements));
  if (group.kernel->fit != nullptr) {
    update.direction = direction.data();
    update.rows = MatrixRows(spec);
    update.least_norm = group.kernel->fit(update.rows, update.n / update.rows, update.constants);
  }
  std::vector<kernels::TileStatistics> tiles((spec.elements + kernels::kTile - 1) / kernels::kTile);
  if (group.kernel->measure != nullptr) {
    std::vector<float> sums(tiles.size());
    group.kernel->measure(update, 0, tiles.size(), sums.data());
    const double sum = std::accumulate(sums.begin(), sums.end(), 0.0);
    if (group.kernel->finish != nullptr) group.kernel->finish(sum, spec.elements, update.constants);
    if (group.kernel->fit != nullptr) {
      kernels::OrthogonalizeAlone(update.rows, update.n / update.rows, sum, update.least_norm, update.direction);
    }
  }
  group.kernel->update(update, 0, tiles.size(), tiles.data());
  t.statistics = kernels::Combine(tiles, true);
  Average(tensor, step);
}

std::string Reference::EncodeWeights(uint32_t tensor) const {
  return Encode(tensor, *spec_.groups[spec_.tensors[tensor].group].master, tensors_[tensor].master_planes.data());
}

std::string Reference::Encode(uint32_t tensor, const kernels::MasterFormat& master, std::byte* const* planes) const {
  const TensorSpec& spec = spec_.tensors[tensor];
  std::string out(ServingBytes(spec), '\0');
  std::vector<float> scales;
  for (uint64_t first = 0; spec.row_length > 0 && first < spec.elements; first += spec.row_length) {
    scales.push_back(master.absmax(planes, first, first + spec.row_length));
  }
  master.encode_weights(planes, spec.serving_format, scales.data(), spec.row_length, out.data(), 0, spec.elements);
  return out;
}

std::vector<std::byte*> Reference::PlanesOf(uint32_t tensor, kernels::PlaneKind kind) const {
  std::vector<std::byte*> planes;
  const auto all = spec_.groups[spec_.tensors[tensor].group].kernel->planes;
  for (size_t p = 0; p < all.size(); ++p) {
    if (all[p].kind == kind) planes.push_back(tensors_[tensor].planes[p]);
  }
  return planes;
}

std::vector<float> Reference::Master(uint32_t tensor) const {
  const TensorSpec& spec = spec_.tensors[tensor];
  std::vector<float> values(spec.elements);
  spec_.groups[spec.group].master->encode_weights(tensors_[tensor].master_planes.data(),
                                                  kernels::FindWireFormat("fp32"), nullptr, 0, values.data(), 0,
                                                  spec.elements);
  return values;
}

std::vector<float> Reference::State(uint32_t tensor, kernels::PlaneKind kind) const {
  std::vector<float> values(spec_.tensors[tensor].elements);
  StateCodec(spec_, tensor, kind)->decode(PlanesOf(tensor, kind).data(), values.data(), values.size());
  return values;
}

void Reference::LoadState(uint32_t tensor, kernels::PlaneKind kind, const std::vector<float>& values) {
  EXPECT_TRUE(StateCodec(spec_, tensor, kind)
                  ->encode(PlanesOf(tensor, kind).data(), values.data(), values.size(), /*random_key=*/0,
                           /*stochastic=*/false));
}

std::vector<float> Reference::Scales(uint32_t tensor) const {
  const TensorSpec& spec = spec_.tensors[tensor];
  std::vector<float> scales;
  for (uint64_t first = 0; spec.row_length > 0 && first < spec.elements; first += spec.row_length) {
    scales.push_back(
        spec_.groups[spec.group].master->absmax(tensors_[tensor].master_planes.data(), first, first + spec.row_length));
  }
  return scales;
}

std::vector<float> Reference::ScalesOfChunks(uint32_t tensor) const {
  const TensorSpec& spec = spec_.tensors[tensor];
  const std::vector<float> scales = Scales(tensor);
  std::vector<float> sent;
  for (uint64_t k = 0; k < ChunkCount(spec_, spec); ++k) {
    const ScaleRange range = ScalesOf(spec, ChunkBegin(spec_, k), ChunkEnd(spec_, spec, k));
    for (uint64_t i = range.first; i < range.last; ++i) sent.push_back(scales[i]);
  }
  return sent;
}

uint64_t Reference::Digest(uint32_t tensor) const {
  const std::vector<float> scales = Scales(tensor);
  const uint64_t codes = WeightDigest(Bytes(EncodeWeights(tensor)));
  if (scales.empty()) return codes;
  const uint64_t both[] = {
      codes, WeightDigest({reinterpret_cast<const std::byte*>(scales.data()), scales.size() * sizeof(float)})};
  return WeightDigest({reinterpret_cast<const std::byte*>(both), sizeof both});
}

}  // namespace ballast::testing
