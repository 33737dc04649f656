// RunSpec.part: what this daemon has of a run that several own.
#include "absl/strings/str_cat.h"

#include "server/base/status_macros.h"
#include "server/convert/convert.h"

namespace ballast {
namespace {

using absl::InvalidArgumentError;
using absl::StrCat;

constexpr uint32_t kMostParts = 1024;

absl::Status CheckNumbers(const v1::RunSpec& spec) {
  const v1::RunPart& part = spec.part();
  if (part.count() < 2 || part.count() > kMostParts || part.index() >= part.count()) {
    return InvalidArgumentError(StrCat("part is ", part.index(), " of ", part.count(), "; wanted: 2 to ", kMostParts,
                                       " parts, counted from 0"));
  }
  if (part.tensors_size() != spec.tensors_size()) {
    return InvalidArgumentError(StrCat("part.tensors has ", part.tensors_size(), " numbers, but there are ",
                                       spec.tensors_size(), " tensors; wanted: one for each"));
  }
  for (int i = 0; i < part.tensors_size(); ++i) {
    const bool ascends = i == 0 || part.tensors(i) > part.tensors(i - 1);
    if (ascends && part.tensors(i) < part.whole_tensors()) continue;
    return InvalidArgumentError(StrCat("part.tensors[", i, "] is ", part.tensors(i),
                                       "; wanted: ascending numbers below part.whole_tensors, ", part.whole_tensors()));
  }
  return absl::OkStatus();
}

// What only a daemon that has all of the run can do.
absl::Status CheckPolicies(const v1::RunSpec& spec) {
  if (spec.on_lost_rank() == v1::LOST_RANK_POLICY_CONTINUE) {
    return InvalidArgumentError(
        "on_lost_rank is LOST_RANK_POLICY_CONTINUE, and the run is on several daemons, which may lose a rank in "
        "different steps: leave it unset, or give the run to one daemon");
  }
  if (spec.spikes().action() != v1::SPIKE_ACTION_SKIP) return absl::OkStatus();
  for (const int kind : spec.spikes().act_on()) {
    if (kind == v1::SPIKE_KIND_GRADIENT_NORM) continue;
    return InvalidArgumentError(
        StrCat("spikes.act_on has ", v1::SpikeKind_Name(static_cast<v1::SpikeKind>(kind)),
               ", with spikes.action = SPIKE_ACTION_SKIP, and the run is on several daemons, each of which finds those "
               "in its own tensors alone: act on SPIKE_KIND_GRADIENT_NORM, which is of the whole run"));
  }
  if (!spec.spikes().act_on().empty()) return absl::OkStatus();
  return InvalidArgumentError(
      "spikes.action is SPIKE_ACTION_SKIP, and the run is on several daemons: set spikes.act_on to "
      "SPIKE_KIND_GRADIENT_NORM, since each daemon finds other kinds in its own tensors alone");
}

}  // namespace

absl::Status TakePart(const v1::RunSpec& spec, RunSpec* made) {
  if (!spec.has_part()) return absl::OkStatus();
  RETURN_IF_ERROR(CheckNumbers(spec));
  RETURN_IF_ERROR(CheckPolicies(spec));
  made->part = RunPart{.index = spec.part().index(), .count = spec.part().count()};
  return absl::OkStatus();
}

}  // namespace ballast
