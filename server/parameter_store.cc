#include "server/parameter_store.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "server/status_macros.h"

namespace ballast {
namespace {

const kernels::Kernel& KernelOf(const RunSpec& spec, uint32_t tensor) {
  return *spec.groups[spec.tensors[tensor].group].kernel;
}
size_t Index(kernels::Kind kind) { return static_cast<size_t>(kind); }

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
      step_of_(environment.spec->tensors.size()),
      queue_(environment.device->NewQueue()) {
  hyper_.reserve(kernels::kMaxConstants);
  LayOut();
}

ParameterStore::~ParameterStore() = default;

void ParameterStore::LayOut() {
  std::array<uint64_t, 3> end = {};
  for (uint32_t i = 0; i < placements_.size(); ++i) {
    const auto planes = KernelOf(*environment_.spec, i).planes;
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
  return absl::OkStatus();
}

PlanBytes ParameterStore::bytes() const {
  return {.weights = buffers_[0].bytes(),
          .momentum = buffers_[1].bytes(),
          .variance = buffers_[2].bytes(),
          .gradients = 0,
          .staging = tiles_.bytes(),
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
  for (size_t h = 0; h < hyper_.size(); ++h) {
    const std::string_view name = group.kernel->hypers[h].name;
    if (name == "lr") hyper_[h] *= t.lr_scale;
    if (name == "weight_decay") hyper_[h] *= t.wd_scale;
  }
  UpdateTask task{.kernel = group.kernel, .tiles = reinterpret_cast<kernels::TileStatistics*>(tiles_.data())};
  for (size_t p = 0; p < group.kernel->planes.size(); ++p) task.update.planes[p] = PlaneAt(tensor, p);
  task.update.grad = values.gradient;
  task.update.grad_format = t.gradient_format;
  task.update.n = t.elements;
  task.update.grad_scale = static_cast<float>(1 / values.loss_scale);
  task.update.random_key = kernels::RandomKey(t.key, values.step);
  task.update.stochastic = group.stochastic;
  task.update.full_statistics = values.full_statistics;
  group.kernel->prepare(hyper_, ++updates_[tensor], task.update.constants);
  step_of_[tensor] = values.step;
  queue_->Submit(task, OnStrand(std::move(done)));
}

void ParameterStore::Serve(TensorRange range, std::byte* out, Done done) {
  const TensorSpec& t = environment_.spec->tensors[range.tensor];
  queue_->Submit(ServeTask{.master = environment_.spec->groups[t.group].master,
                           .planes = MasterPlanes(range.tensor),
                           .format = t.serving_format,
                           .first = range.first,
                           .last = range.last,
                           .out = out},
                 OnStrand(std::move(done)));
}

void ParameterStore::Load(TensorRange range, kernels::WireIndex format, const std::byte* in, Done done) {
  const TensorSpec& t = environment_.spec->tensors[range.tensor];
  queue_->Submit(LoadTask{.master = environment_.spec->groups[t.group].master,
                          .planes = MasterPlanes(range.tensor),
                          .format = format,
                          .first = range.first,
                          .last = range.last,
                          .in = in},
                 OnStrand(std::move(done)));
}

}  // namespace ballast
