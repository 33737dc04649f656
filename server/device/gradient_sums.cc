#include "server/device/gradient_sums.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <variant>

#include "server/device/fair_queue.h"

namespace ballast {
namespace {

using kernels::kTile;

// What is summed at once: its sums are still in the second-level cache when the update reads them.
constexpr uint64_t kPieceTiles = 4;
// Jobs that JoinSums looks at. A run has some of other tensors between those of one.
constexpr size_t kLookBack = 64;

// Where the part begins in the gradient, in elements.
uint64_t BeginOf(const UpdateTask& task, const SumTask& sum) {
  const auto bytes = static_cast<uint64_t>(sum.to - static_cast<const std::byte*>(task.update.grad));
  return bytes / WireBytes(task.update.grad_format);
}

// The part's share of tiles [first, last) of the gradient.
Extent ShareOf(const UpdateTask& task, const SumTask& sum, uint64_t first, uint64_t last) {
  const uint64_t begin = BeginOf(task, sum) / kTile;
  return {std::clamp(begin, first, last), std::clamp(begin + kernels::TilesOf(sum.elements), first, last)};
}

void Make(const UpdateTask& task, const SumTask& sum, Extent tiles) {
  const uint64_t begin = BeginOf(task, sum);
  RunSum(sum, tiles.first * kTile - begin, std::min(tiles.last * kTile - begin, sum.elements));
}

void Update(const UpdateTask& task, const kernels::Update& update, Extent tiles) {
  if (tiles.first < tiles.last) task.kernel->update(update, tiles.first, tiles.last, task.tiles + tiles.first);
}

void UpdateShare(const UpdateTask& task, const SumTask& sum, Extent tiles) {
  if (IsAsItCame(sum)) {
    kernels::Update update = task.update;
    // As if the part before it lay before it; the kernel reads nothing there.
    const auto at = reinterpret_cast<uintptr_t>(sum.terms[0].payload.bytes().data());
    update.grad = reinterpret_cast<const void*>(at - BeginOf(task, sum) * WireBytes(update.grad_format));
    return Update(task, update, tiles);
  }
  for (uint64_t at = tiles.first; at < tiles.last; at += kPieceTiles) {
    const Extent piece{at, std::min(tiles.last, at + kPieceTiles)};
    Make(task, sum, piece);
    Update(task, task.update, piece);
  }
}

bool NeedsSums(const DeviceTask& task) {
  return std::holds_alternative<UpdateTask>(task) || std::holds_alternative<MeasureTask>(task) ||
         std::holds_alternative<CurvatureTask>(task);
}

// The place in the queue, as RingBuffer::back has it, of the last sum of the tensor's; nullopt: there is none that may be made
// later than what comes behind it, of which these were found.
std::optional<size_t> FindSum(FairQueue* queue, uint32_t tensor, const GradientSums& found, size_t from) {
  for (size_t later = from; later < std::min(queue->jobs.size(), kLookBack); ++later) {
    const DeviceJob& job = queue->jobs.back(later);
    if (!job.tensor) return std::nullopt;  // it may work on anything
    if (*job.tensor != tensor) continue;
    const auto* sum = std::get_if<SumTask>(&job.task);
    if (sum == nullptr && !NeedsSums(job.task)) continue;
    const auto is_of_part = [&](const SumTask& other) { return other.to == sum->to; };
    const bool stays = sum == nullptr || sum->elements == 0 || std::any_of(found.begin(), found.end(), is_of_part);
    return stays ? std::nullopt : std::optional(later);
  }
  return std::nullopt;
}

}  // namespace

void UpdateWithSums(const UpdateTask& task, uint64_t first, uint64_t last) {
  if (task.sums != nullptr) {
    for (const SumTask& sum : *task.sums) {
      const Extent share = ShareOf(task, sum, first, last);
      if (share.first == share.last) continue;
      Update(task, task.update, {first, share.first});
      UpdateShare(task, sum, share);
      first = share.last;
    }
  }
  Update(task, task.update, {first, last});
}

void MakeSums(const UpdateTask& task, uint64_t first, uint64_t last) {
  if (task.sums == nullptr) return;
  for (const SumTask& sum : *task.sums) {
    const Extent share = ShareOf(task, sum, first, last);
    if (share.first < share.last) Make(task, sum, share);
  }
}

void JoinSums(FairQueue* queue, DeviceJob* update) {
  auto* const task = std::get_if<UpdateTask>(&update->task);
  if (task == nullptr || task->sums != nullptr || !update->tensor) return;
  GradientSums sums;
  // What waits before the last sums of all parts is of an earlier step, whose gradient lay elsewhere perhaps.
  uint64_t left = task->update.n;
  size_t from = 0;
  while (left > 0) {
    const auto at = FindSum(queue, *update->tensor, sums, from);
    if (!at) break;
    from = *at;  // where the job before it is then
    DeviceJob job = queue->TakeLate(from);
    sums.push_back(std::get<SumTask>(std::move(job.task)));
    left -= std::min(left, sums.back().elements);
    // Those that came later are already to be answered before the update, and this one before them.
    update->done = [first = std::move(job.done), then = std::move(update->done)](const TaskResult& result) mutable {
      first({});
      then(result);
    };
  }
  if (sums.empty()) return;
  std::sort(sums.begin(), sums.end(), [](const SumTask& a, const SumTask& b) { return a.to < b.to; });
  task->sums = std::make_shared<GradientSums>(std::move(sums));
  update->cost_bytes = CostBytes(update->task);
}

}  // namespace ballast
