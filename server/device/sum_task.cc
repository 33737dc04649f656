#include "server/device/sum_task.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ballast {
namespace {

using kernels::kTile;

void CopyTerms(const SumTask& task, uint64_t begin, uint64_t end, uint64_t element_bytes) {
  std::byte* const to = task.to + begin * element_bytes;
  const uint64_t bytes = (end - begin) * element_bytes;
  if (task.terms.empty()) {
    std::memset(to, 0, bytes);
  } else {
    std::memcpy(to, task.terms.front().payload.bytes().data() + begin * element_bytes, bytes);
  }
}

void AddTerms(const SumTask& task, uint64_t begin, uint64_t end, const kernels::WireFormat& format) {
  auto* const sum = reinterpret_cast<float*>(task.to);
  bool first = task.first;
  const auto covers = [&](const SumTask::Term& t) { return t.first <= begin && t.last >= end; };
  if (first && (task.terms.empty() || !covers(task.terms.front()))) {
    std::fill(sum + begin, sum + end, -0.0f);
    first = false;
  }
  for (const SumTask::Term& term : task.terms) {
    const uint64_t from = std::max(begin, term.first), to = std::min(end, term.last);
    if (from >= to) continue;
    const std::byte* const in = term.payload.bytes().data() + (from - term.first) * static_cast<uint64_t>(format.bytes);
    format.accumulate(sum + from, in, to - from, std::exchange(first, false));
  }
}

}  // namespace

void RunSum(const SumTask& task, uint64_t begin, uint64_t end) {
  if (begin == end) return;  // of a tensor without elements, which may have no memory
  const auto& format = kernels::WireFormats()[static_cast<size_t>(task.format)];
  if (!task.adds) return CopyTerms(task, begin, end, static_cast<uint64_t>(format.bytes));
  for (uint64_t at = begin; at < end; at += kTile) AddTerms(task, at, std::min(end, at + kTile), format);
}

}  // namespace ballast
