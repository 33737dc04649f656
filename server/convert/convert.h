// The one place where wire messages become plain values and back. Everything a peer can get wrong in a description is
// refused here, by a message that names the tensor or field, what was got, what is wanted and the fix.
//
// Pure functions; thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "ballast/v1/admin.pb.h"
#include "ballast/v1/run.pb.h"
#include "ballast/v1/trainer.pb.h"
#include "server/config/config.h"
#include "server/device/devices.h"
#include "server/plan/plan.h"
#include "server/run/rank_stream.h"
#include "server/run/run.h"
#include "server/spec/run_spec.h"

namespace ballast {

absl::StatusOr<RunSpec> ToRunSpec(const v1::RunSpec& spec, const Config::Limits& limits);

// Bitmaps are little end first; bits past the end must be clear in what comes in.
absl::StatusOr<std::vector<bool>> ToBits(absl::string_view bytes, size_t count, absl::string_view field);
std::string FromBits(const std::vector<bool>& bits);

absl::StatusOr<message::StepBegin> ToStepBegin(const v1::StepBegin& begin, const RunSpec& spec);
absl::StatusOr<Coverage> ToCoverage(const v1::AttachRequest& request, const RunSpec& spec,
                                    const ChunkSet::Starts& starts);
// Takes the client state out of the message.
absl::StatusOr<message::StepEnd> ToStepEnd(v1::StepEnd* end, const RunSpec& spec);
absl::StatusOr<message::MicroEnd> ToMicroEnd(const v1::MicroEnd& end, const RunSpec& spec);
// All but the checksum. `reason`: the metrics' word for what is wrong.
absl::Status CheckGradient(const v1::Gradient& gradient, uint64_t payload_bytes, const RunSpec& spec,
                           absl::string_view* reason);
// Of a batch or of one by itself; takes the data out of the message.
absl::StatusOr<std::vector<LoadChunk>> ToLoadChunks(v1::LoadStateRequest* request, const RunSpec& spec);

// Swaps the piece's own data in, and copies its scales; the checksum is of what is encoded.
void FillWeights(const WeightsChunk& chunk, const RunSpec& spec, WeightPiece* piece, v1::Weights* weights);
v1::Credit FromCredit(const output::Credit& credit);
v1::StepOutcome FromOutcome(Outcome outcome);
v1::SpikeEvent FromSpike(const SpikeEvent& event, const RunSpec& spec);
v1::StepResult FromResult(const StepRecord& closed, const RunSpec& spec);
// `devices`: where it is or would be.
v1::RunPlan FromPlan(const Plan& plan, const std::vector<std::string>& devices, uint64_t memory_free_bytes);
v1::DeviceStatus FromDevice(const Devices::State& state);
v1::RunStatus FromRun(const Run& run, uint64_t memory_free_bytes);
// Steps after `after`, the newest `most`.
v1::GetHistoryResponse FromHistory(const Run& run, uint64_t after, size_t most);
RewindOrder ToRewindOrder(const v1::RewindRequest& request);
v1::AttachResponse FromAttachReply(const Run::AttachReply& reply, const RunSpec& spec);

// The parts of a spec. `at` names the place in refusals.
absl::Status TakePolicies(const v1::RunSpec& spec, RunSpec* made);
absl::Status TakeSpikes(const v1::RunSpec& spec, RunSpec* made);  // when all else is there
absl::Status TakeRewind(const v1::RunSpec& spec, RunSpec* made);
absl::StatusOr<GroupSpec> ToGroupSpec(const v1::GroupSpec& group, const std::string& at);
// A format of this name that is fit for gradients or for serving, by the flag of that name.
absl::StatusOr<kernels::WireIndex> ToWireFormat(const std::string& name, bool kernels::WireFormat::*fit,
                                                const std::string& at);
// Those that the registry holds, for refusals.
std::string ListWireFormats(bool kernels::WireFormat::*fit);

}  // namespace ballast
