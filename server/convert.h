// The one place where wire messages become plain values and back. Everything a peer can get wrong in a description is
// refused here, by a message that names the tensor or field, what was got, what is wanted and the mend.
//
// Pure functions; thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "ballast/v1/run.pb.h"
#include "ballast/v1/trainer.pb.h"
#include "server/config.h"
#include "server/plan.h"
#include "server/rank_stream.h"
#include "server/run.h"
#include "server/run_spec.h"

namespace ballast {

absl::StatusOr<RunSpec> ToRunSpec(const v1::RunSpec& spec, const Config::Limits& limits);

// Bitmaps are little end first; bits past the end must be clear in what comes in.
absl::StatusOr<std::vector<bool>> ToBits(absl::string_view bytes, size_t count, absl::string_view field);
std::string FromBits(const std::vector<bool>& bits);

// `micro` 0 is the only one of this version.
absl::StatusOr<message::StepBegin> ToStepBegin(const v1::StepBegin& begin, const RunSpec& spec);
absl::StatusOr<message::MicroEnd> ToMicroEnd(const v1::MicroEnd& end, const RunSpec& spec);
absl::Status CheckMicro(uint32_t micro);
// All but the checksum. `reason`: the metrics' word for what is wrong.
absl::Status CheckGradient(const v1::Gradient& gradient, const RunSpec& spec, absl::string_view* reason);
absl::StatusOr<LoadChunk> ToLoadChunk(v1::LoadStateRequest* request, const RunSpec& spec);

// Swaps `data` in; the checksum is of it.
void FillWeights(const WeightsChunk& chunk, const RunSpec& spec, std::string* data, v1::Weights* weights);
v1::StepResult FromClosedStep(const ClosedStep& closed);
v1::RunPlan FromPlan(const Plan& plan, uint64_t memory_free_bytes);
v1::RunStatus FromRun(const Run& run, uint64_t memory_free_bytes);
v1::AttachResponse FromAttachReply(const Run::AttachReply& reply, const RunSpec& spec);

// "fp32, bf16, fp16": what the registry holds, for refusals.
std::string ListWireFormats();

}  // namespace ballast
