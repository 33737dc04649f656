#include "server/parameter_store.h"

#include <algorithm>
#include <utility>

#include "server/status_macros.h"

namespace ballast {
namespace {

const kernels::Kernel& KernelOf(const RunSpec& spec, uint32_t tensor) {
  return *spec.groups[spec.tensors[tensor].group].kernel;
}
size_t Index(kernels::Kind kind) { return static_cast<size_t>(kind); }

double ScaleOf(const TensorSpec& t, kernels::ScaledBy scaled_by) {
  const double scales[] = {1, t.lr_scale, t.wd_scale};
  return scales[static_cast<size_t>(scaled_by)];
}

}  // namespace

absl::StatusOr<std::unique_ptr<ParameterStore>> ParameterStore::Create(Environment environment) {
  std::unique_ptr<ParameterStore> store(new ParameterStore(environment));
  RETURN_IF_ERROR(store->Allocate());
  return store;
}

ParameterStore::ParameterStore(Environment environment)
    : environment_(environment),
      placements_(environment.spec->tensors.size()),
      updates_(environment.spec->tensors.size()),
      step_of_(environment.spec->tensors.size()) {
  hyper_.reserve(kernels::kMaxConstants);
  LayOut();
}

ParameterStore::~ParameterStore() = default;

void ParameterStore::LayOut() {
  std::array<uint64_t, 3> end = {};
  uint64_t scales = 0;
  for (uint32_t i = 0; i < placements_.size(); ++i) {
    const auto planes = KernelOf(*environment_.spec, i).planes;
    placements_[i].first_scale = scales;
    scales += ScaleCount(environment_.spec->tensors[i]);
    for (size_t p = 0; p < planes.size(); ++p) {
      uint64_t& offset = end[Index(planes[p].kind)];
      placements_[i].offset[p] = offset;
      offset += AlignedPlaneBytes(planes[p], environment_.spec->tensors[i].elements);
    }
  }
}

absl::Status ParameterStore::Allocate() {
  const Plan plan = MakePlan(*environment_.spec);
  const uint64_t bytes[] = {plan.bytes.weights, plan.bytes.momentum, plan.bytes.variance};
  for (size_t kind = 0; kind < buffers_.size(); ++kind) {
    ASSIGN_OR_RETURN(buffers_[kind], environment_.device->Allocate(bytes[kind], Place::kDevice));
  }
  const uint64_t tile_bytes = AlignUp(plan.statistics_tiles * sizeof(kernels::TileStatistics));
  ASSIGN_OR_RETURN(tiles_, environment_.device->Allocate(tile_bytes, Place::kDevice));
  const uint64_t scale_bytes = AlignUp(plan.scales * sizeof(float));
  ASSIGN_OR_RETURN(scales_, environment_.device->Allocate(scale_bytes, Place::kDevice));
  ASSIGN_OR_RETURN(queue_,
                   environment_.device->NewQueue({.tiles = plan.statistics_tiles,
                                                  .payload_bytes = environment_.spec->chunk_elements * sizeof(float),
                                                  .scales = plan.send_slot_scales}));
  return absl::OkStatus();
}

PlanBytes ParameterStore::bytes() const {
  return {.weights = buffers_[0].bytes(),
          .momentum = buffers_[1].bytes(),
          .variance = buffers_[2].bytes(),
          .gradients = 0,
          .staging = tiles_.bytes() + scales_.bytes(),
          .padding = 0};
}

std::byte* ParameterStore::PlaneAt(uint32_t tensor, size_t plane) const {
  const kernels::Plane& p = KernelOf(*environment_.spec, tensor).planes[plane];
  return buffers_[Index(p.kind)].data() + placements_[tensor].offset[plane];
}

std::array<std::byte*, kernels::kMaxPlanes> ParameterStore::MasterPlanes(uint32_t tensor) const {
  std::array<std::byte*, kernels::kMaxPlanes> planes = {};
  const auto all = KernelOf(*environment_.spec, tensor).planes;
  for (size_t p = 0, next = 0; p < all.size(); ++p) {
    if (all[p].kind == kernels::Kind::kWeights) planes[next++] = PlaneAt(tensor, p);
  }
  return planes;
}

DeviceQueue::Completion ParameterStore::OnStrand(Done done) {
  return [strand = environment_.strand, done = std::move(done)](const TaskResult& result) mutable {
    strand->Post([done = std::move(done), result]() mutable { done(result); });
  };
}

void ParameterStore::Update(uint32_t tensor, const UpdateValues& values, Done done) {
  const TensorSpec& t = environment_.spec->tensors[tensor];
  const GroupSpec& group = environment_.spec->groups[t.group];
  hyper_.assign(values.hyper.begin(), values.hyper.end());
  for (size_t h = 0; h < hyper_.size(); ++h) hyper_[h] *= ScaleOf(t, group.kernel->hypers[h].scaled_by);
  UpdateTask task{.kernel = group.kernel, .tiles = reinterpret_cast<kernels::TileStatistics*>(tiles_.data())};
  for (size_t p = 0; p < group.kernel->planes.size(); ++p) task.update.planes[p] = PlaneAt(tensor, p);
  task.update.grad = values.gradient;
  task.update.grad_format = t.gradient_format;
  task.update.n = t.elements;
  task.update.grad_scale = static_cast<float>(1 / values.loss_scale);
  task.update.random_key = kernels::RandomKey(t.key, values.step);
  task.update.stochastic = group.stochastic;
  task.update.statistics = values.statistics;
  group.kernel->prepare(hyper_, ++updates_[tensor], task.update.constants);
  step_of_[tensor] = values.step;
  placements_[tensor].scales_present = false;
  queue_->Submit(task, OnStrand(std::move(done)));
}

float* ParameterStore::PresentScales(uint32_t tensor) {
  const TensorSpec& t = environment_.spec->tensors[tensor];
  if (t.row_length == 0) return nullptr;
  Placement& placement = placements_[tensor];
  float* const scales = reinterpret_cast<float*>(scales_.data()) + placement.first_scale;
  if (!std::exchange(placement.scales_present, true)) {
    queue_->Submit(ScaleTask{.master = environment_.spec->groups[t.group].master,
                             .planes = MasterPlanes(tensor),
                             .elements = t.elements,
                             .row_length = t.row_length,
                             .scales = scales},
                   [](const TaskResult&) {});
  }
  return scales;
}

void ParameterStore::Serve(TensorRange range, WeightPiece* out, Done done) {
  const TensorSpec& t = environment_.spec->tensors[range.tensor];
  out->data.resize((range.last - range.first) * WireBytes(t.serving_format));
  out->scales.resize(ScalesOf(t, range.first, range.last).size());
  const float* const scales = PresentScales(range.tensor);
  queue_->Submit(ServeTask{.master = environment_.spec->groups[t.group].master,
                           .planes = MasterPlanes(range.tensor),
                           .format = t.serving_format,
                           .first = range.first,
                           .last = range.last,
                           .out = reinterpret_cast<std::byte*>(out->data.data()),
                           .scales = scales,
                           .row_length = t.row_length,
                           .scales_out = out->scales.data()},
                 OnStrand(std::move(done)));
}

void ParameterStore::Load(TensorRange range, kernels::WireIndex format, const std::byte* in, Done done) {
  const TensorSpec& t = environment_.spec->tensors[range.tensor];
  placements_[range.tensor].scales_present = false;
  queue_->Submit(LoadTask{.master = environment_.spec->groups[t.group].master,
                          .planes = MasterPlanes(range.tensor),
                          .format = format,
                          .first = range.first,
                          .last = range.last,
                          .in = in},
                 OnStrand(std::move(done)));
}

}  // namespace ballast
