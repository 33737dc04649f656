#include "server/store/parameter_store.h"

#include <algorithm>
#include <utility>

#include "server/base/status_macros.h"
#include "server/spec/stored_planes.h"

namespace ballast {
namespace {

double ScaleOf(const TensorSpec& t, kernels::ScaledBy scaled_by) {
  const double scales[] = {1, t.lr_scale, t.wd_scale};
  return scales[static_cast<size_t>(scaled_by)];
}

float GradientScale(const ParameterStore::UpdateValues& values) {
  return static_cast<float>(1 / values.gradient_divisor);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ParameterStore>> ParameterStore::Create(Environment environment) {
  std::unique_ptr<ParameterStore> store(new ParameterStore(std::move(environment)));
  const std::vector<KindBytes> own = store->LayOut();
  for (size_t s = 0; s < store->shards_.size(); ++s) {
    const Environment& e = store->environment_;
    RETURN_IF_ERROR(store->Allocate(e.plan->shards[s], own[s], e.devices[s], &store->shards_[s]));
  }
  if (const ParameterStore* const past = store->environment_.past) RETURN_IF_ERROR(store->CarryOver(*past));
  return store;
}

ParameterStore::ParameterStore(Environment environment)
    : environment_(std::move(environment)),
      stays_(environment_.past == nullptr ? std::vector<bool>(environment_.spec->tensors.size())
                                          : environment_.past->Staying(*environment_.spec)),
      completions_(environment_.strand),
      spots_(environment_.spec->tensors.size()),
      versions_(environment_.spec->tensors.size()),
      updates_(environment_.spec->tensors.size()),
      step_of_(environment_.spec->tensors.size()),
      averaged_(environment_.spec->tensors.size()),
      shards_(environment_.plan->shards.size()) {
  hyper_.reserve(kernels::kMaxConstants);
}

ParameterStore::~ParameterStore() = default;

std::vector<ParameterStore::KindBytes> ParameterStore::LayOut() {
  struct End {
    uint64_t scales = 0, kept = 0;
  };
  std::vector<End> ends(shards_.size());
  std::vector<KindBytes> of_kind(shards_.size());
  for (uint32_t i = 0; i < spots_.size(); ++i) {
    const uint32_t shard = environment_.plan->placement.shard_of[i];
    End& end = ends[shard];
    const StoredPlanes planes(*environment_.spec, environment_.spec->tensors[i]);
    const size_t of_kernel = KernelOf(*environment_.spec, i).planes.size();
    spots_[i].first_scale = end.scales;
    end.scales += ScaleRoom(*environment_.spec, environment_.spec->tensors[i]);
    spots_[i].first_kept = end.kept;
    end.kept += KeptBytes(*environment_.spec, environment_.spec->tensors[i]);
    for (size_t p = 0; p < planes.size() && !stays_[i]; ++p) {
      uint64_t& offset = of_kind[shard][Index(planes[p].kind)];
      if (p < of_kernel) spots_[i].offset[p] = offset;
      if (p == of_kernel) spots_[i].first_average = offset;
      offset += AlignedPlaneBytes(planes[p], environment_.spec->tensors[i].elements);
    }
  }
  return of_kind;
}

absl::Status ParameterStore::Allocate(const ShardPlan& plan, const KindBytes& own, Device* device, Shard* shard) const {
  if (own[0] > 0) {  // else all of the shard's tensors stay
    Part& part = shard->parts.emplace_back();
    for (size_t kind = 0; kind < own.size(); ++kind) {
      ASSIGN_OR_RETURN(part.buffers[kind], device->Allocate(own[kind], Place::kDevice));
    }
  }
  const uint64_t tile_bytes = AlignUp(plan.statistics_tiles * sizeof(kernels::TileStatistics));
  ASSIGN_OR_RETURN(shard->tiles, device->Allocate(tile_bytes, Place::kDevice));
  ASSIGN_OR_RETURN(shard->scales, device->Allocate(AlignUp(plan.scales * sizeof(float)), Place::kDevice));
  ASSIGN_OR_RETURN(shard->kept, device->Allocate(plan.kept_bytes, Place::kDevice));
  ASSIGN_OR_RETURN(shard->matrix, device->Allocate(plan.matrix_bytes, Place::kDevice));
  ASSIGN_OR_RETURN(shard->queue, device->NewQueue({.tiles = plan.statistics_tiles,
                                                   .payload_bytes = environment_.spec->chunk_elements * sizeof(float),
                                                   .scales = environment_.plan->encoded_scales,
                                                   .elements = environment_.plan->parameters,
                                                   .averages = !environment_.spec->averages.empty()}));
  return absl::OkStatus();
}

PlanBytes ParameterStore::bytes() const {
  PlanBytes sum;
  for (const Shard& shard : shards_) {
    sum += {.staging = shard.tiles.bytes() + shard.scales.bytes() + shard.kept.bytes() + shard.matrix.bytes()};
    for (const Part& part : shard.parts) {
      sum += {.weights = part.buffers[0].bytes(),
              .momentum = part.buffers[1].bytes(),
              .variance = part.buffers[2].bytes(),
              .averages = part.buffers[3].bytes()};
    }
  }
  return sum;
}

void ParameterStore::WaitIdle() const {
  for (const Shard& shard : shards_) shard.queue->WaitIdle();
}

kernels::PlaneKind ParameterStore::KindOf(uint32_t tensor, size_t plane) const {
  const auto planes = KernelOf(*environment_.spec, tensor).planes;
  return plane < planes.size() ? planes[plane].kind : kernels::PlaneKind::kAverage;
}

uint64_t ParameterStore::OffsetOf(uint32_t tensor, size_t plane) const {
  const size_t of_kernel = KernelOf(*environment_.spec, tensor).planes.size();
  if (plane < of_kernel) return spots_[tensor].offset[plane];
  const TensorSpec& t = environment_.spec->tensors[tensor];
  const StoredPlanes planes(*environment_.spec, t);
  uint64_t offset = spots_[tensor].first_average;
  for (size_t p = of_kernel; p < plane; ++p) offset += AlignedPlaneBytes(planes[p], t.elements);
  return offset;
}

std::byte* ParameterStore::PlaneAt(uint32_t tensor, size_t plane) const {
  const Part& part = ShardOf(tensor).parts[spots_[tensor].part];
  return part.buffers[Index(KindOf(tensor, plane))].data() + OffsetOf(tensor, plane);
}

const kernels::MasterFormat& ParameterStore::MasterOf(uint32_t tensor, WeightSeries series) const {
  return series.average ? kernels::AverageMaster()
                        : *environment_.spec->groups[environment_.spec->tensors[tensor].group].master;
}

std::array<std::byte*, kernels::kMaxPlanes> ParameterStore::MasterPlanes(uint32_t tensor, const StoreImage* image,
                                                                         WeightSeries series) const {
  std::array<std::byte*, kernels::kMaxPlanes> planes = {};
  const auto all = KernelOf(*environment_.spec, tensor).planes;
  size_t next = 0;
  const auto add = [&](size_t p) {
    planes[next++] = image == nullptr ? PlaneAt(tensor, p) : PlaneIn(*image, tensor, p);
  };
  if (series.average) {
    const size_t first = FirstPlaneOfAverage(*environment_.spec, environment_.spec->tensors[tensor], *series.average);
    for (size_t p = 0; p < kAveragePlanes; ++p) add(first + p);
    return planes;
  }
  for (size_t p = 0; p < all.size(); ++p) {
    if (all[p].kind == kernels::PlaneKind::kWeights) add(p);
  }
  return planes;
}

void ParameterStore::SubmitUpdate(uint32_t tensor, UpdateTask task, Done done) {
  const bool shares = task.kernel->fit != nullptr;
  Submit(tensor, std::move(task), completions_.OnStrand(std::move(done)),
         shares ? std::nullopt : std::optional(tensor));
}

void ParameterStore::Submit(uint32_t tensor, DeviceTask task, DeviceQueue::Completion done) {
  Submit(tensor, std::move(task), std::move(done), tensor);
}

void ParameterStore::Submit(uint32_t tensor, DeviceTask task, DeviceQueue::Completion done,
                            std::optional<uint32_t> works_on) {
  ShardOf(tensor).queue->Enqueue(std::move(task), std::move(done), works_on);
  if (wakes_.exchange(true)) return;
  completions_.Post([this] {
    wakes_ = false;
    for (Shard& shard : shards_) shard.queue->Wake();
  });
}

UpdateTask ParameterStore::MakeUpdate(uint32_t tensor, const UpdateValues& values, uint64_t t) {
  const TensorSpec& spec = environment_.spec->tensors[tensor];
  const GroupSpec& group = environment_.spec->groups[spec.group];
  hyper_.assign(values.hyper.begin(), values.hyper.end());
  for (size_t h = 0; h < hyper_.size(); ++h) hyper_[h] *= ScaleOf(spec, group.kernel->hypers[h].scaled_by);
  UpdateTask task{.kernel = group.kernel, .tiles = TilesOf(tensor), .there = values.measured || values.summed_there};
  for (size_t p = 0; p < group.kernel->planes.size(); ++p) task.update.planes[p] = PlaneAt(tensor, p);
  task.update.grad = values.gradient;
  task.update.grad_format = values.gradient_format;
  task.update.n = spec.elements;
  task.update.grad_scale = GradientScale(values);
  task.update.clip = values.clip;
  task.update.random_key = kernels::RandomKey(spec.key, values.step);
  task.update.stochastic = group.stochastic;
  task.update.statistics = values.statistics;
  group.kernel->prepare(hyper_, t, task.update.constants);
  if (IsOverMatrix(*environment_.spec, spec)) TakeMatrix(tensor, &task);
  return task;
}

void ParameterStore::TakeMatrix(uint32_t tensor, UpdateTask* task) const {
  kernels::Update& u = task->update;
  u.rows = MatrixRows(environment_.spec->tensors[tensor]);
  u.direction = reinterpret_cast<float*>(ShardOf(tensor).matrix.data());
  u.least_norm = task->kernel->fit(u.rows, u.n / u.rows, u.constants);
  task->room = u.direction + kernels::PaddedElements(u.n);
}

void ParameterStore::Sum(uint32_t tensor, SumTask sum, Done done) {
  Submit(tensor, std::move(sum), completions_.OnStrand(std::move(done)));
}

void ParameterStore::WhenSummed(uint32_t tensor, Done done) {
  Submit(tensor, SumTask{}, completions_.OnStrand(std::move(done)));  // of nothing, which parts no batch of a GPU
}

void ParameterStore::Update(uint32_t tensor, const UpdateValues& values, Done done,
                            std::shared_ptr<GradientSums> sums) {
  UpdateTask task = MakeUpdate(tensor, values, ++updates_[tensor]);
  task.sums = std::move(sums);
  step_of_[tensor] = values.step;
  Change(tensor);
  spots_[tensor].scales_of = nullptr;
  SubmitUpdate(tensor, std::move(task), std::move(done));
  MoveAverages(tensor, values.step);
}

void ParameterStore::Average(uint32_t tensor, uint64_t step) {
  Change(tensor);
  spots_[tensor].scales_of = nullptr;
  MoveAverages(tensor, step);
}

void ParameterStore::MoveAverages(uint32_t tensor, uint64_t step) {
  const bool begins = !averaged_[tensor];
  averaged_[tensor] = !environment_.spec->averages.empty();
  SubmitAverages({tensor, 0, environment_.spec->tensors[tensor].elements}, step, begins);
}

void ParameterStore::SubmitAverages(TensorRange range, uint64_t step, bool begins) {
  const RunSpec& spec = *environment_.spec;
  const TensorSpec& t = spec.tensors[range.tensor];
  for (uint32_t a = 0; a < spec.averages.size(); ++a) {
    const auto weights = MasterPlanes(range.tensor), planes = MasterPlanes(range.tensor, nullptr, {.average = a});
    AverageTask task{.master = spec.groups[t.group].master, .first = range.first, .last = range.last};
    std::copy_n(weights.begin(), std::size(task.average.weights), task.average.weights);
    std::copy_n(planes.begin(), std::size(task.average.planes), task.average.planes);
    task.average.n = range.last;
    task.average.random_key = kernels::RandomKey(kernels::AverageKey(t.key, spec.averages[a]), step);
    task.average.pull = static_cast<float>(1 - spec.averages[a]);
    task.average.begins = begins;
    Submit(range.tensor, task, [](const TaskResult&) {});
  }
}

void ParameterStore::Measure(uint32_t tensor, const UpdateValues& values, Done done) {
  Submit(tensor,
         MeasureTask{.gradient = values.gradient,
                     .format = values.gradient_format,
                     .elements = environment_.spec->tensors[tensor].elements,
                     .scale = GradientScale(values),
                     .tiles = TilesOf(tensor),
                     .there = values.summed_there},
         completions_.OnStrand(std::move(done)));
}

void ParameterStore::DryUpdate(uint32_t tensor, const UpdateValues& values, Done done) {
  UpdateTask task = MakeUpdate(tensor, values, updates_[tensor] + 1);
  task.update.dry = true;
  task.update.statistics = kernels::StatisticsLevel::kCore;
  SubmitUpdate(tensor, std::move(task), std::move(done));
}

void ParameterStore::Curvature(uint32_t tensor, const UpdateValues& values, Done done) {
  const kernels::Kernel& kernel = KernelOf(*environment_.spec, tensor);
  Spot& spot = spots_[tensor];
  const std::byte* planes[kernels::kMaxPlanes] = {};
  for (size_t p = 0; p < kernel.planes.size(); ++p) planes[p] = PlaneAt(tensor, p);
  CurvatureTask task{.kernel = &kernel,
                     .probe = kernels::ProbeOf(kernel, planes),
                     .tiles = reinterpret_cast<kernels::TileCurvature*>(TilesOf(tensor)),
                     .there = values.measured || values.summed_there};
  task.probe.grad = values.gradient;
  task.probe.grad_format = values.gradient_format;
  task.probe.n = environment_.spec->tensors[tensor].elements;
  task.probe.grad_scale = GradientScale(values);
  task.probe.clip = values.clip;
  task.probe.before = reinterpret_cast<float*>(ShardOf(tensor).kept.data() + spot.first_kept);
  task.probe.first = !spot.kept_after || *spot.kept_after + 1 != updates_[tensor];
  if (!task.probe.first) task.probe.preconditioner = kernel.precondition(values.hyper, updates_[tensor]);
  spot.kept_after = updates_[tensor];
  Submit(tensor, task, completions_.OnStrand(std::move(done)));
}

kernels::TileStatistics* ParameterStore::TilesOf(uint32_t tensor) const {
  return reinterpret_cast<kernels::TileStatistics*>(ShardOf(tensor).tiles.data());
}

float* ParameterStore::PresentScales(uint32_t tensor, const StoreImage* image, WeightSeries series) {
  const TensorSpec& t = environment_.spec->tensors[tensor];
  const uint64_t row_length = RowLength(t, series.format.value_or(t.serving_format));
  if (row_length == 0) return nullptr;
  Spot& spot = spots_[tensor];
  float* const scales = reinterpret_cast<float*>(ShardOf(tensor).scales.data()) + spot.first_scale;
  const void* const wanted = image == nullptr ? static_cast<const void*>(this) : image;
  const bool other = std::exchange(spot.scales_series, series) != series;
  if (std::exchange(spot.scales_of, wanted) != wanted || other) {
    Submit(tensor,
           ScaleTask{.master = &MasterOf(tensor, series),
                     .planes = MasterPlanes(tensor, image, series),
                     .elements = t.elements,
                     .row_length = row_length,
                     .scales = scales,
                     .from_aside = image != nullptr},
           [](const TaskResult&) {});
  }
  return scales;
}

TensorRange ParameterStore::TilesAround(TensorRange range) const {
  const uint64_t end = kernels::TilesOf(range.last) * kernels::kTile;
  return {range.tensor, range.first / kernels::kTile * kernels::kTile,
          std::min(end, environment_.spec->tensors[range.tensor].elements)};
}

DeviceQueue::Completion ParameterStore::CutAndSeal(TensorRange range, TensorRange tiles, uint64_t element_bytes,
                                                   WeightPiece* out, Done done) {
  const bool whole = range.first == tiles.first && range.last == tiles.last;
  const uint64_t first = (range.first - tiles.first) * element_bytes,
                 bytes = (range.last - range.first) * element_bytes;
  return [=, answer = completions_.OnStrand(std::move(done))](const TaskResult& result) mutable {
    if (!whole) out->Cut(first, bytes);
    out->Seal();
    answer(result);
  };
}

DeviceQueue::Completion ParameterStore::WhenEncoded(TensorRange range, TensorRange tiles, uint64_t element_bytes,
                                                    WeightPiece* out, Done done) {
  if (range.first == tiles.first && range.last == tiles.last)
    return completions_.OnStrand(std::move(done));  // the task sealed it
  return CutAndSeal(range, tiles, element_bytes, out, std::move(done));
}

void ParameterStore::EncodeWeights(TensorRange wanted, WeightPiece* out, Done done, const StoreImage* image,
                                   WeightSeries series) {
  const TensorSpec& t = environment_.spec->tensors[wanted.tensor];
  const kernels::WireIndex format = series.format.value_or(t.serving_format);
  const uint64_t row_length = RowLength(t, format);
  const TensorRange range = TilesAround(wanted);
  auto sealed = WhenEncoded(wanted, range, WireBytes(format), out, std::move(done));
  std::byte* const to = out->Resize((range.last - range.first) * WireBytes(format));
  out->scales.resize(ScalesOf(row_length, range.first, range.last).size());
  Submit(range.tensor,
         EncodeWeightsTask{.master = &MasterOf(range.tensor, series),
                           .planes = MasterPlanes(range.tensor, image, series),
                           .format = format,
                           .first = range.first,
                           .last = range.last,
                           .out = to,
                           .scales = PresentScales(range.tensor, image, series),
                           .row_length = row_length,
                           .scales_out = out->scales.data(),
                           .crc32c = out->on_device ? nullptr : &out->crc32c,
                           .out_on_device = out->on_device,
                           .from_aside = image != nullptr},
         std::move(sealed));
}

void ParameterStore::EncodeMaster(TensorRange wanted, WeightPiece* out, Done done, const StoreImage* image,
                                  WeightSeries series) {
  const TensorRange range = TilesAround(wanted);
  auto sealed = WhenEncoded(wanted, range, sizeof(float), out, std::move(done));
  out->scales.clear();
  Submit(range.tensor,
         EncodeWeightsTask{.master = &MasterOf(range.tensor, series),
                           .planes = MasterPlanes(range.tensor, image, series),
                           .format = kernels::FindWireFormat("fp32"),
                           .first = range.first,
                           .last = range.last,
                           .out = out->Resize((range.last - range.first) * sizeof(float)),
                           .crc32c = &out->crc32c,
                           .from_aside = image != nullptr},
         std::move(sealed));
}

void ParameterStore::Load(TensorRange range, kernels::WireIndex format, const std::byte* in, Done done) {
  const TensorSpec& t = environment_.spec->tensors[range.tensor];
  Change(range.tensor);
  spots_[range.tensor].scales_of = nullptr;
  spots_[range.tensor].kept_after.reset();
  Submit(range.tensor,
         LoadTask{.master = environment_.spec->groups[t.group].master,
                  .planes = MasterPlanes(range.tensor),
                  .format = format,
                  .first = range.first,
                  .last = range.last,
                  .in = in},
         completions_.OnStrand(std::move(done)));
  averaged_[range.tensor] = false;
  SubmitAverages(range, /*step=*/0, /*begins=*/true);
}

}  // namespace ballast
