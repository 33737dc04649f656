// The one place where wire messages become plain values and back. Everything a peer can get wrong in a description is
// refused here, by a message that names the tensor or field, what was got, what is wanted and the fix.
//
// Pure functions; thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "ballast/v1/admin.pb.h"
#include "ballast/v1/follow.pb.h"
#include "ballast/v1/run.pb.h"
#include "ballast/v1/trainer.pb.h"
#include "server/config/config.h"
#include "server/device/device_pool.h"
#include "server/follow/followers.h"
#include "server/plan/plan.h"
#include "server/run/rank_stream.h"
#include "server/run/run.h"
#include "server/run/run_registry.h"
#include "server/spec/run_spec.h"

namespace ballast {

// has_storage: of the daemon, which then writes every run to its disk.
absl::StatusOr<RunSpec> ToRunSpec(const v1::RunSpec& spec, const Config::Limits& limits, bool has_storage = false);

// A bit for each tensor (proto/bitmap.h); bits past the last must be clear.
absl::StatusOr<std::vector<bool>> ToBits(absl::string_view bytes, size_t count, absl::string_view field);

absl::StatusOr<message::StepBegin> ToStepBegin(const v1::StepBegin& begin, const RunSpec& spec);
absl::StatusOr<Coverage> ToCoverage(const v1::AttachRequest& request, const RunSpec& spec,
                                    const ChunkSet::Starts& starts);
// What is sent of each tensor; empty(): all. `slots`: of the request.
absl::StatusOr<ChunkSet> ToParts(const v1::PullRequest& request, absl::Span<const StateSlot> slots, const RunSpec& spec,
                                 const ChunkSet::Starts& starts);
// Takes the client state out of the message.
absl::StatusOr<message::StepEnd> ToStepEnd(v1::StepEnd* end, const RunSpec& spec);
absl::StatusOr<message::MicroEnd> ToMicroEnd(const v1::MicroEnd& end, const RunSpec& spec);
// Checks everything but the checksum, and whether the payload is all of what the rank contributes to of the chunk: that
// is known on the strand. `reason`: the metrics' word for what is wrong.
absl::Status CheckGradient(const v1::Gradient& gradient, uint64_t payload_bytes, const RunSpec& spec,
                           absl::string_view* reason);
// Whether the lists are of one length, and the data is what they say.
absl::Status CheckSmallGradients(const v1::SmallGradients& gradients);
// As CheckGradient, of one of them.
absl::Status CheckSmallGradient(uint32_t tensor, uint64_t bytes, const RunSpec& spec, absl::string_view* reason);
// The chunks of a batch, or the one chunk of a message without a batch. Moves the data out of the message.
absl::StatusOr<std::vector<LoadChunk>> ToLoadChunks(v1::LoadStateRequest* request, const RunSpec& spec);

// The tensors of a Pull: those that it names, or all.
absl::StatusOr<std::vector<uint32_t>> ToTensors(const v1::PullRequest& request, const RunSpec& spec);
// The slots of a Pull that names them, or weights; each at most once.
absl::StatusOr<std::vector<StateSlot>> ToStateSlots(const v1::PullRequest& request);
// The place of the average with this decay. INVALID_ARGUMENT lists those that there are.
absl::StatusOr<uint32_t> ToAverage(double decay, const RunSpec& spec);

// Swaps the piece's own data into the message, and copies its scales; the checksum covers the encoded bytes.
void FillWeights(const WeightsChunk& chunk, const RunSpec& spec, WeightPiece* piece, v1::Weights* weights);
v1::Credit FromCredit(const output::Credit& credit);
v1::StepMeasured FromMeasured(const output::Measured& measured);
v1::StepOutcome FromOutcome(Outcome outcome);
v1::SpikeEvent FromSpike(const SpikeEvent& event, const RunSpec& spec);
v1::StepResult FromResult(const StepRecord& closed, const RunSpec& spec);
v1::StepRecord FromRecord(const StepRecord& record, const RunSpec& spec);
// `devices`: the labels of those that hold the run, or would hold it.
v1::RunPlan FromPlan(const Plan& plan, const std::vector<std::string>& devices, uint64_t memory_free_bytes);
v1::DeviceStatus FromDevice(const DevicePool::State& state);
v1::RunStatus FromRun(const Run& run, uint64_t memory_free_bytes);
// The newest `most` of the steps after step `after`.
v1::GetHistoryResponse FromHistory(const Run& run, uint64_t after, size_t most);
RewindOrder ToRewindOrder(const v1::RewindRequest& request);
absl::StatusOr<WeightSeries> ToSeries(const v1::ListVersionsRequest& request, const RunSpec& spec);
absl::StatusOr<FollowOrder> ToFollowOrder(const v1::SubscribeRequest& request, const RunSpec& spec);
// Of a request with `version`.
absl::StatusOr<FollowOrder> ToFollowOrder(const v1::PullRequest& request, const RunSpec& spec);
absl::StatusOr<Followers::TagOrder> ToTagOrder(const v1::TagVersionRequest& request);
VersionId ToVersionId(const v1::VersionId& id);
v1::VersionId FromVersionId(const VersionId& id);
v1::TaggedVersion FromTag(const VersionTag& tag);
v1::ListVersionsResponse FromVersions(const Followers::VersionList& list);
v1::FollowStatus FromFollow(const FollowFigures& figures);
v1::DurabilityStatus FromDurability(const Durability& durability);
v1::CheckpointResponse FromCheckpointed(const RunRegistry::Checkpointed& checkpointed);
v1::ListCheckpointsResponse FromStored(const std::vector<RunRegistry::StoredCheckpoint>& stored);
v1::AttachResponse FromAttachReply(const Run::AttachReply& reply, const RunSpec& spec);

// ToRunSpec calls these for the parts of a spec. `at` names the place in refusals.
absl::Status TakePolicies(const v1::RunSpec& spec, RunSpec* made);
absl::Status TakeSpikes(const v1::RunSpec& spec, RunSpec* made);  // when all else is there
absl::Status TakeRewind(const v1::RunSpec& spec, RunSpec* made);
absl::Status TakeFollow(const v1::RunSpec& spec, RunSpec* made);  // when tensors and averages are there
absl::Status TakeAverages(const v1::RunSpec& spec, RunSpec* made);
absl::Status TakePart(const v1::RunSpec& spec, RunSpec* made);
absl::Status TakeCheckpoints(const v1::RunSpec& spec, bool has_storage, RunSpec* made);
absl::StatusOr<GroupSpec> ToGroupSpec(const v1::GroupSpec& group, const std::string& at);
// The wire format of this name. `fit`: the flag that says whether it may carry gradients, or weights that are served.
absl::StatusOr<kernels::WireIndex> ToWireFormat(const std::string& name, bool kernels::WireFormat::*fit,
                                                const std::string& at);
// The names of the wire formats that the registry has for this use; for refusals.
std::string ListWireFormats(bool kernels::WireFormat::*fit);

}  // namespace ballast
