#include "server/device/batch_groups.h"

#include <algorithm>
#include <variant>

#include "server/spec/run_spec.h"

namespace ballast {
namespace {

using kernels::TilesOf;

BatchGroups::Group GroupOf(const DeviceTask& task) {
  if (std::holds_alternative<SumTask>(task)) return BatchGroups::kSums;
  if (std::holds_alternative<AverageTask>(task)) return BatchGroups::kAverages;
  if (std::holds_alternative<ScaleTask>(task)) return BatchGroups::kScales;
  if (std::holds_alternative<EncodeWeightsTask>(task)) return BatchGroups::kServes;
  const bool alone = std::holds_alternative<LoadTask>(task) || std::holds_alternative<CopyTask>(task);
  return alone ? BatchGroups::kAlone : BatchGroups::kGradients;
}

// The tensors' memory that a task works on, but for gradients and what only it knows; nullptr: none.
struct Use {
  const void *reads = nullptr, *reads_too = nullptr, *writes = nullptr;
};
Use UseOf(const DeviceTask& task) {
  if (const auto* u = std::get_if<UpdateTask>(&task)) return {.writes = u->update.planes[0]};
  if (const auto* c = std::get_if<CurvatureTask>(&task)) return {.writes = c->probe.before};
  if (const auto* a = std::get_if<AverageTask>(&task)) {
    return {.reads = a->average.weights[0], .writes = a->average.planes[0]};
  }
  if (const auto* s = std::get_if<ScaleTask>(&task)) return {.reads = s->planes[0], .writes = s->scales};
  const auto* s = std::get_if<EncodeWeightsTask>(&task);
  return s != nullptr ? Use{.reads = s->planes[0], .reads_too = s->scales} : Use{};
}

void AddTo(std::vector<const void*>* all, const void* one) {
  if (one != nullptr) all->push_back(one);
}
bool Has(const std::vector<const void*>& all, const void* one) {
  return one != nullptr && std::ranges::find(all, one) != all.end();
}

MemoryRange BytesAt(const void* data, uint64_t bytes) { return {static_cast<const std::byte*>(data), bytes}; }

// The gradient that the task sums, or reads from the host.
MemoryRange GradientAt(const DeviceTask& task) {
  if (const auto* s = std::get_if<SumTask>(&task)) return PlaceOf(*s);
  if (const auto* u = std::get_if<UpdateTask>(&task); u != nullptr && !u->there) {
    return BytesAt(u->update.grad, u->update.n * WireBytes(u->update.grad_format));
  }
  if (const auto* c = std::get_if<CurvatureTask>(&task); c != nullptr && !c->there) {
    return BytesAt(c->probe.grad, c->probe.n * WireBytes(c->probe.grad_format));
  }
  if (const auto* m = std::get_if<MeasureTask>(&task); m != nullptr && !m->there) {
    return BytesAt(m->gradient, m->elements * WireBytes(m->format));
  }
  return {};
}

// Whether one launch does both, which are of one group.
bool OfOneLaunch(const DeviceTask& a, const DeviceTask& b) {
  if (a.index() != b.index()) return false;
  if (const auto* u = std::get_if<UpdateTask>(&a)) {
    return u->kernel->fit == nullptr && u->kernel == std::get<UpdateTask>(b).kernel;
  }
  if (const auto* c = std::get_if<CurvatureTask>(&a)) {
    return c->kernel->curvature == std::get<CurvatureTask>(b).kernel->curvature;
  }
  if (const auto* m = std::get_if<AverageTask>(&a)) return m->master == std::get<AverageTask>(b).master;
  if (const auto* s = std::get_if<ScaleTask>(&a)) return s->master == std::get<ScaleTask>(b).master;
  if (const auto* s = std::get_if<EncodeWeightsTask>(&a)) {
    const auto& t = std::get<EncodeWeightsTask>(b);
    return s->master == t.master && s->format == t.format;
  }
  return std::holds_alternative<MeasureTask>(a) || std::holds_alternative<SumTask>(a);
}

uint64_t InRows(uint64_t elements) { return (elements + kernels::kPad - 1) / kernels::kPad * kernels::kPad; }

BatchRoom RoomOfSum(const SumTask& sum) {
  BatchRoom room{.terms = sum.terms.size()};
  for (const SumTask::Term& term : sum.terms) {
    if (!term.payload.on_device()) room.payload_bytes += RoomOfTerm(sum.elements, sum.format);
  }
  return room;
}

}  // namespace

BatchRoom RoomOf(const DeviceTask& task) {
  if (const auto* u = std::get_if<UpdateTask>(&task)) return {.tiles = TilesOf(u->update.n)};
  if (const auto* m = std::get_if<MeasureTask>(&task)) return {.tiles = TilesOf(m->elements)};
  if (const auto* c = std::get_if<CurvatureTask>(&task)) return {.tiles = kernels::SampledTiles(c->probe.n)};
  if (const auto* sum = std::get_if<SumTask>(&task)) return RoomOfSum(*sum);
  const auto* s = std::get_if<EncodeWeightsTask>(&task);
  if (s == nullptr) return {};
  const uint64_t payload_bytes = s->out_on_device ? 0 : AlignPart(InRows(s->last - s->first) * WireBytes(s->format));
  return {.payload_bytes = payload_bytes, .scales = RowsOf(*s).count};
}

const SumTask* HostSumOf(const DeviceTask& task) {
  const auto* sum = std::get_if<SumTask>(&task);
  return sum == nullptr || sum->on_device ? nullptr : sum;
}

uint64_t RoomOfTerm(uint64_t elements, kernels::WireIndex format) {
  return AlignPart(InRows(elements) * WireBytes(format));
}

Rows RowsOf(const EncodeWeightsTask& task) {
  if (task.scales == nullptr || task.first == task.last) return {};
  const uint64_t first = task.first / task.row_length;
  return {first, (task.last - 1) / task.row_length + 1 - first};
}

void BatchGroups::Clear() {
  for (Tasks& group : groups_) group.tasks.clear(), group.read.clear(), group.written.clear();
  taken_ = {};
  summed_ = {};
  size_ = 0;
}

bool BatchGroups::IsSummedAt(MemoryRange place) const {
  return Overlap(summed_, place) && std::ranges::any_of(groups_[kSums].tasks, [&](const DeviceTask* other) {
           return Overlap(PlaceOf(std::get<SumTask>(*other)), place);
         });
}

bool BatchGroups::HasRoomFor(const BatchRoom& room) const {
  return taken_.tiles + room.tiles <= capacity_.tiles &&
         taken_.payload_bytes + room.payload_bytes <= capacity_.payload_bytes &&
         taken_.scales + room.scales <= capacity_.scales && taken_.terms + room.terms <= capacity_.terms;
}

bool BatchGroups::CanJoin(const DeviceTask& task) const {
  if (empty()) return true;
  const Group own = GroupOf(task);
  if (own == kAlone || !groups_[kAlone].tasks.empty()) return false;
  const auto& tasks = groups_[own].tasks;
  if (!tasks.empty() && (tasks.size() == kMostTasks || !OfOneLaunch(*tasks.front(), task))) return false;
  if (IsSummedAt(GradientAt(task))) return false;
  const Use use = UseOf(task);
  const auto in_its_way = [&use](const Tasks& group) {  // done at the same time or later, though it came before
    return Has(group.written, use.reads) || Has(group.written, use.reads_too) || Has(group.written, use.writes) ||
           Has(group.read, use.writes);
  };
  return HasRoomFor(RoomOf(task)) && std::none_of(groups_.begin() + own, groups_.end(), in_its_way);
}

void BatchGroups::Join(const DeviceTask* task) {
  Tasks& group = groups_[GroupOf(*task)];
  group.tasks.push_back(task);
  const Use use = UseOf(*task);
  AddTo(&group.read, use.reads);
  AddTo(&group.read, use.reads_too);
  AddTo(&group.written, use.writes);
  const BatchRoom room = RoomOf(*task);
  taken_.tiles += room.tiles;
  taken_.payload_bytes += room.payload_bytes;
  taken_.scales += room.scales;
  taken_.terms += room.terms;
  if (const auto* sum = std::get_if<SumTask>(task)) summed_ = Around(summed_, PlaceOf(*sum));
  ++size_;
}

}  // namespace ballast
