// What the daemons of a run say of their parts, as one answer about the run: proto/PROTOCOL.md, "Several daemons".
//
// Pure functions; thread-safe. Lists are by part, and not empty.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"

#include "ballast/v1/admin.pb.h"
#include "ballast/v1/run.pb.h"
#include "client/cpp/client.h"
#include "client/cpp/parts/part_placement.h"

namespace ballast {

// Another one, whenever one of the daemons has another.
uint64_t MergeGenerations(const std::vector<uint64_t>& generations);
// Sums; no device where some part does not fit.
v1::RunPlan MergePlans(absl::Span<const v1::RunPlan> plans);
// Sums, the worst state, and the last step that all have closed. Snapshots: those that all have. Without durable_step: what
// each daemon has on its disk does not tell what all have. `staged`: as below.
v1::RunStatus MergeStatuses(absl::Span<const v1::RunStatus> statuses, const PartPlacement& placement, bool staged);
// Steps by number, with the first part's times and losses and the worst outcome; the layers and tensors of all.
v1::GetHistoryResponse MergeHistories(absl::Span<const v1::GetHistoryResponse> histories, bool staged);
v1::GetServerResponse MergeServers(absl::Span<const v1::GetServerResponse> servers,
                                   absl::Span<const std::string> names);
// Those that all have are as in the first part, with the bytes of all; the others say where they are alone. `names`: of the
// daemons.
v1::ListCheckpointsResponse MergeCheckpoints(absl::Span<const v1::ListCheckpointsResponse> lists,
                                             absl::Span<const std::string> names);

// The run's outcome of one step, likewise without durable_step. `staged`: norms are the run's already.
v1::StepResult MergeResults(absl::Span<const v1::StepResult> results, const PartPlacement& placement,
                            absl::Span<const std::string> names, bool staged);
StepTiming MergeTimings(absl::Span<const StepResult> results);

// What the whole step measures. `tensor_names`: of the run.
v1::WholeMeasure MergeMeasures(absl::Span<const MeasuredStep> measures, const PartPlacement& placement,
                               absl::Span<const std::string> tensor_names);

}  // namespace ballast
