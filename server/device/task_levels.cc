#include "server/device/task_levels.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>
#include <variant>

#include "server/spec/run_spec.h"

namespace ballast {
namespace {

bool IsAlone(const DeviceJob& job) {
  return !job.tensor || std::holds_alternative<LoadTask>(job.task) || std::holds_alternative<CopyTask>(job.task) ||
         std::holds_alternative<CurvatureTask>(job.task);
}

// Where the task's gradient lies, and its length; nullptr: it has none.
std::pair<const std::byte*, uint64_t> GradientPlace(const DeviceTask& task) {
  if (const auto* sum = std::get_if<SumTask>(&task)) {
    const absl::Span<std::byte> place = PlaceOf(*sum);
    return {place.data(), place.size()};
  }
  if (const auto* update = std::get_if<UpdateTask>(&task)) {
    return {static_cast<const std::byte*>(update->update.grad),
            update->update.n * WireBytes(update->update.grad_format)};
  }
  if (const auto* measure = std::get_if<MeasureTask>(&task)) {
    return {measure->gradient, measure->elements * WireBytes(measure->format)};
  }
  return {nullptr, 0};
}

// One tensor's sums of one level, by where they begin. Chunks come one after another, up or down, as a rule: then none is
// between others, and it need not be looked for whether one comes again.
struct SumsOfLevel {
  uint32_t level = 0;
  uintptr_t first = UINTPTR_MAX, last = 0;

  bool Spans(const std::byte* at) const {
    return reinterpret_cast<uintptr_t>(at) >= first && reinterpret_cast<uintptr_t>(at) <= last;
  }
  void Add(const std::byte* at) {
    first = std::min(first, reinterpret_cast<uintptr_t>(at));
    last = std::max(last, reinterpret_cast<uintptr_t>(at));
  }
};

}  // namespace

void TaskLevels::Plan(absl::Span<const DeviceJob> jobs) {
  const auto n = static_cast<uint32_t>(jobs.size());
  level_.assign(n, 0);
  uint32_t next = 0;
  for (uint32_t begin = 0; begin < n;) {
    if (IsAlone(jobs[begin])) {
      level_[begin++] = next++;
      continue;
    }
    uint32_t end = begin;
    while (end < n && !IsAlone(jobs[end])) ++end;
    next = PlanTogether(jobs, begin, end, next);
    begin = end;
  }
  Sort();
}

uint32_t TaskLevels::PlanTogether(absl::Span<const DeviceJob> jobs, uint32_t begin, uint32_t end, uint32_t next) {
  if (Overlap(jobs, begin, end)) {
    for (uint32_t i = begin; i < end; ++i) level_[i] = next++;
    return next;
  }
  order_.resize(end - begin);
  std::iota(order_.begin(), order_.end(), begin);
  std::sort(order_.begin(), order_.end(),
            [&](uint32_t a, uint32_t b) { return std::pair(*jobs[a].tensor, a) < std::pair(*jobs[b].tensor, b); });
  for (size_t first = 0; first < order_.size();) {
    size_t last = first;
    while (last < order_.size() && jobs[order_[last]].tensor == jobs[order_[first]].tensor) ++last;
    PlanTensor(jobs, absl::MakeConstSpan(order_).subspan(first, last - first), next);
    first = last;
  }
  return *std::max_element(level_.begin() + begin, level_.begin() + end) + 1;
}

bool TaskLevels::Overlap(absl::Span<const DeviceJob> jobs, uint32_t begin, uint32_t end) {
  gradients_.clear();
  for (uint32_t i = begin; i < end; ++i) {
    const auto [data, bytes] = GradientPlace(jobs[i].task);
    const auto at = reinterpret_cast<uintptr_t>(data);
    if (bytes > 0) gradients_.push_back({at, at + bytes, *jobs[i].tensor});
  }
  std::sort(gradients_.begin(), gradients_.end(), [](const Bytes& a, const Bytes& b) { return a.begin < b.begin; });
  Bytes furthest;
  for (const Bytes& one : gradients_) {
    if (one.begin < furthest.end && one.tensor != furthest.tensor) return true;
    if (one.end > furthest.end) furthest = one;
  }
  return false;
}

void TaskLevels::PlanTensor(absl::Span<const DeviceJob> jobs, absl::Span<const uint32_t> places, uint32_t next) {
  uint32_t after_write = next, after_read = next;  // the first level that may follow each
  SumsOfLevel sums{.level = next};
  for (size_t i = 0; i < places.size(); ++i) {
    uint32_t& level = level_[places[i]];
    if (const auto* sum = std::get_if<SumTask>(&jobs[places[i]].task)) {
      const auto same = [&](uint32_t before) {
        const auto* other = std::get_if<SumTask>(&jobs[before].task);
        return other != nullptr && other->to == sum->to && level_[before] == sums.level;
      };
      if (sums.level < after_write) sums = {.level = after_write};
      if (sums.Spans(sum->to) && std::any_of(places.begin(), places.begin() + static_cast<std::ptrdiff_t>(i), same)) {
        sums = {.level = sums.level + 1};
      }
      sums.Add(sum->to);
      level = sums.level;
      after_read = std::max(after_read, level + 1);
    } else if (std::holds_alternative<EncodeWeightsTask>(jobs[places[i]].task)) {
      level = after_write;
      after_read = std::max(after_read, level + 1);
    } else {
      level = std::max(after_write, after_read);
      after_write = level + 1;
    }
  }
}

void TaskLevels::Sort() {
  order_.resize(level_.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::sort(order_.begin(), order_.end(),
            [this](uint32_t a, uint32_t b) { return std::pair(level_[a], a) < std::pair(level_[b], b); });
  ends_.clear();
  for (size_t i = 0; i < order_.size(); ++i) {
    if (i + 1 == order_.size() || level_[order_[i]] != level_[order_[i + 1]]) ends_.push_back(i + 1);
  }
}

}  // namespace ballast
