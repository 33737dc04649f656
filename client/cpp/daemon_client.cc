#include "client/cpp/daemon_client.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "client/cpp/follow/version_tags.h"
#include "client/cpp/parts/part_deletion.h"
#include "client/cpp/stream/ready.h"
#include "client/cpp/stream/session.h"
#include "client/cpp/stream/step_stream.h"
#include "client/cpp/stream/weight_transfer.h"
#include "client/cpp/transport/connection.h"
#include "client/cpp/transport/retry.h"
#include "client/cpp/transport/transport_opener.h"
#include "client/cpp/wire/tensor_table.h"

namespace ballast {
namespace {

// How long Rewind, Restore and a replacement of weights wait for this client's session to end. The daemon has said so
// at once; if the connection is lost just then, it is replaced within this time.
constexpr absl::Duration kTellTimeout = absl::Seconds(30);

// What gRPC says of a message that is too long names neither the key nor the fix.
absl::Status ExplainSpec(const absl::Status& status, const v1::RunSpec& spec) {
  if (!absl::IsResourceExhausted(status) || !absl::StrContains(status.message(), "message larger than max")) {
    return status;
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "the spec of run '", spec.run_id(), "', ", spec.tensors_size(), " tensors, takes ", spec.ByteSizeLong(),
      " bytes, more than the daemon's limits.spec_bytes; raise it there (", status.message(), ")"));
}

// A daemon that knows no averages passes them over: the plan that it made has no room for them.
absl::Status CheckAverages(const v1::RunSpec& spec, const v1::RunPlan& made, const std::string& server) {
  if (spec.averages().empty() || made.server().averages() > 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the daemon at ", server, " is older than this client, and keeps no averages of weights for run '",
                   spec.run_id(), "': update it, or do without them"));
}

bool Sharded(const Shards& shards) {
  return std::any_of(shards.begin(), shards.end(), [](const auto& shard) { return shard.has_value(); });
}

// Leaves out of the request the tensors that nothing is held of, and names the parts of those that are held in part.
void NameParts(const TensorTable& tensors, v1::PullRequest* request) {
  std::vector<uint32_t> wanted(request->tensors().begin(), request->tensors().end());
  if (wanted.empty()) {
    wanted.resize(tensors.size());
    std::iota(wanted.begin(), wanted.end(), 0);
  }
  std::erase_if(wanted, [&](uint32_t i) { return i < tensors.size() && tensors[i].held_elements() == 0; });
  request->mutable_tensors()->Assign(wanted.begin(), wanted.end());
  for (const uint32_t i : wanted) {
    if (i >= tensors.size() || tensors[i].whole()) continue;
    v1::TensorCoverage* part = request->add_parts();
    part->set_tensor(i);
    part->add_receives()->set_begin(tensors[i].shard.begin);
    part->mutable_receives(0)->set_end(tensors[i].shard.end);
  }
}

// Pulls what the caller holds of the tensors that the request names.
absl::Status PullShards(DaemonClient& client, Connection& connection, v1::PullRequest request, const Shards& shards,
                        const ServedSink& sink) {
  if (!Sharded(shards)) return PullWeights(connection, request, nullptr, sink);
  const auto run = client.GetRun(request.run_id());
  if (!run.ok()) return run.status();
  const auto tensors = TensorTable::Create(run->spec(), run->status().plan().chunk_elements(), shards);
  if (!tensors.ok()) return tensors.status();
  NameParts(*tensors, &request);
  if (request.parts_size() > 0 && request.digests_size() > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("Pull with digests of ", tensors->Name(request.parts(0).tensor()),
                     ", which is pulled in part: digests are of whole tensors; leave them out"));
  }
  return request.tensors().empty() ? absl::OkStatus() : PullWeights(connection, request, &*tensors, sink);
}

}  // namespace

absl::Status NotAttached(const char* call) {
  return absl::FailedPreconditionError(absl::StrCat(call, " before Attach: take a rank of a run first"));
}

absl::StatusOr<std::unique_ptr<DaemonClient>> DaemonClient::Connect(ClientOptions options) {
  auto connection = Connection::Open(std::move(options));
  if (!connection.ok()) return connection.status();
  return std::unique_ptr<DaemonClient>(new DaemonClient(*std::move(connection)));
}

template <typename Response, typename Stub, typename Request>
absl::StatusOr<Response> DaemonClient::Call(Stub& stub,
                                            grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                                         Response*),
                                            const Request& request, absl::Duration timeout) {
  Response response;
  if (auto s = connection_->Call(stub, method, request, &response, timeout); !s.ok()) return connection_->Explain(s);
  return response;
}

absl::Status DaemonClient::Explain(const absl::Status& status, const std::string& run) const {
  if (!absl::IsNotFound(status) || run != found_run_) return status;
  const absl::StatusOr<bool> restarted = RestartedSince(*connection_, found_since_);
  if (!restarted.ok()) return connection_->Explain(restarted.status());
  if (!*restarted) return status;
  absl::Status after = connection_->Explain(RunAfterRestart(*connection_, run));
  if (RewoundTo(after) && stream_ && run == run_id_) stream_->AwaitEnd(kTellTimeout);
  return after;
}

const std::string& DaemonClient::server() const { return connection_->server(); }

absl::StatusOr<v1::CreateRunResponse> DaemonClient::CreateRun(const v1::RunSpec& spec) {
  const absl::Time began = BootNow();
  v1::CreateRunRequest request;
  *request.mutable_spec() = spec;
  auto created = CallAgain(*connection_, absl::StrCat("creating run '", spec.run_id(), "'"), connection_->trainer(),
                           &v1::TrainerService::Stub::CreateRun, request);
  if (!created.ok()) return ExplainSpec(created.status(), spec);
  if (auto s = CheckAverages(spec, created->plan(), server()); !s.ok()) return s;
  Found(spec.run_id(), began);
  GoBy(spec.run_id(), created->spec_sha256());
  return created;
}

absl::StatusOr<v1::AmendRunResponse> DaemonClient::AmendRun(const v1::RunSpec& spec) {
  if (!stream_) return NotAttached("AmendRun");
  // A session that was rewound was perhaps amended by this very call, whose answer was lost: the daemon knows.
  if (auto s = stream_->CheckBetweenSteps("AmendRun"); !s.ok() && !RewoundTo(s)) return s;
  v1::AmendRunRequest request;
  request.set_session_token(stream_->token());
  *request.mutable_spec() = spec;
  auto amended = CallAgain(*connection_, absl::StrCat("amending run '", spec.run_id(), "'"), connection_->trainer(),
                           &v1::TrainerService::Stub::AmendRun, request, Connection::kConvertTimeout);
  if (!amended.ok()) return Explain(ExplainSpec(amended.status(), spec), run_id_);
  GoBy(spec.run_id(), amended->spec_sha256());
  if (amended->generation() != generation_) stream_->AwaitEnd(kTellTimeout);
  return amended;
}

absl::StatusOr<v1::GetServerResponse> DaemonClient::GetServer() {
  return CallAgain(*connection_, "asking what the daemon is", connection_->admin(), &v1::AdminService::Stub::GetServer,
                   v1::GetServerRequest());
}

absl::StatusOr<v1::ListRunsResponse> DaemonClient::ListRuns() {
  return CallAgain(*connection_, "listing the runs", connection_->admin(), &v1::AdminService::Stub::ListRuns,
                   v1::ListRunsRequest());
}

absl::StatusOr<v1::GetRunResponse> DaemonClient::GetRun(const std::string& run_id) {
  v1::GetRunRequest request;
  request.set_run_id(run_id);
  auto run = CallAgain(*connection_, absl::StrCat("asking for run '", run_id, "'"), connection_->admin(),
                       &v1::AdminService::Stub::GetRun, request);
  if (!run.ok()) return Explain(run.status(), run_id);
  return run;
}

absl::StatusOr<v1::GetHistoryResponse> DaemonClient::GetHistory(const std::string& run_id, uint64_t after_step,
                                                                uint32_t most) {
  v1::GetHistoryRequest request;
  request.set_run_id(run_id);
  request.set_after_step(after_step);
  request.set_most_steps(most);
  return CallAgain(*connection_, absl::StrCat("asking for the steps of run '", run_id, "'"), connection_->admin(),
                   &v1::AdminService::Stub::GetHistory, request);
}

absl::StatusOr<v1::DeleteRunResponse> DaemonClient::DeletePart(const std::string& run_id, bool force,
                                                               bool keep_checkpoints, uint32_t daemons) {
  return ballast::DeletePart(*connection_, run_id, force, keep_checkpoints, daemons);
}

absl::StatusOr<v1::RunPlan> DaemonClient::Plan(const v1::RunSpec& spec) {
  v1::PlanRequest request;
  *request.mutable_spec() = spec;
  auto response = CallAgain(*connection_, absl::StrCat("planning run '", spec.run_id(), "'"), connection_->admin(),
                            &v1::AdminService::Stub::Plan, request);
  if (!response.ok()) return ExplainSpec(response.status(), spec);
  return response->plan();
}

absl::StatusOr<v1::RewindResponse> DaemonClient::Rewind(const v1::RewindRequest& request) {
  auto response = Call(connection_->admin(), &v1::AdminService::Stub::Rewind, request);
  if (response.ok() && stream_ && run_id_ == request.run_id()) stream_->AwaitEnd(kTellTimeout);
  return response;
}

absl::StatusOr<v1::CheckpointResponse> DaemonClient::Checkpoint(const std::string& run_id) {
  v1::CheckpointRequest request;
  request.set_run_id(run_id);
  auto written =
      CallAgain(*connection_, absl::StrCat("writing a checkpoint of run '", run_id, "'"), connection_->admin(),
                &v1::AdminService::Stub::Checkpoint, request, Connection::kStorageTimeout);
  if (!written.ok()) return Explain(written.status(), run_id);
  return written;
}

absl::StatusOr<v1::ListCheckpointsResponse> DaemonClient::ListCheckpoints(const std::string& run_id) {
  v1::ListCheckpointsRequest request;
  request.set_run_id(run_id);
  return CallAgain(*connection_, absl::StrCat("listing the checkpoints of run '", run_id, "'"), connection_->admin(),
                   &v1::AdminService::Stub::ListCheckpoints, request);
}

absl::StatusOr<v1::RestoreResponse> DaemonClient::Restore(const std::string& run_id, uint64_t step,
                                                          const std::string& from) {
  v1::RestoreRequest request;
  request.set_from(from);
  request.set_run_id(run_id);
  request.set_step(step);
  // The run may be being written, which takes as long as it is large. An answer that is lost is not asked for again.
  Retry retry(*connection_, absl::StrCat("restoring run '", run_id, "'"), {.step = Connection::kStorageTimeout});
  for (;;) {
    auto response = Call(connection_->admin(), &v1::AdminService::Stub::Restore, request, Connection::kStorageTimeout);
    if (!response.ok() && RetryAfter(response.status()) && retry.Again(response.status())) continue;
    if (response.ok() && stream_ && run_id_ == run_id) stream_->AwaitEnd(kTellTimeout);
    return response;
  }
}

absl::StatusOr<Attachment> DaemonClient::Attach(const AttachOptions& options) {
  if (stream_ && RewoundTo(stream_->status())) stream_.reset();
  if (stream_) {
    return absl::FailedPreconditionError("this client is attached already; one client holds one rank of one run");
  }
  const absl::Time began = BootNow();
  if (Sharded(options.shards)) {  // what is wrong with them is said before the rank is taken
    const auto run = GetRun(options.run_id);
    if (!run.ok()) return run.status();
    if (auto s = TensorTable::Create(run->spec(), 1, options.shards).status(); !s.ok()) return s;
  }
  const auto gpu = TransportOpener::GpuOf(options);
  if (!gpu.ok()) return gpu.status();
  const auto nccl = TransportOpener::NcclOf(options);
  if (!nccl.ok()) return nccl.status();
  AttachOptions wanted = options;
  if (wanted.spec_sha256.empty() && spec_run_ == wanted.run_id) wanted.spec_sha256 = spec_sha256_;
  auto grant = TakeRank(*connection_, wanted, run_id_ == wanted.run_id && rank_ == wanted.rank);
  if (!grant.ok()) return Explain(grant.status(), options.run_id);
  Found(options.run_id, began);
  if (Sharded(options.shards) && !grant->takes_partial_chunks()) {
    return absl::UnimplementedError(absl::StrCat("Attach with shards: the daemon at ", server(),
                                                 " is older than this client and does not know them; "
                                                 "update the daemon"));
  }
  auto run = GetRun(options.run_id);
  if (!run.ok()) return run.status();
  auto tensors = TensorTable::Create(run->spec(), grant->chunk_elements(), options.shards);
  if (!tensors.ok()) return tensors.status();
  auto stream = StepStream::Start(
      *connection_, options, *grant, *std::move(tensors),
      [transports = TransportOpener(*connection_, options.transport, *gpu, *nccl)](const auto& granted) mutable {
        return transports.Open(granted);
      },
      *gpu);
  if (!stream.ok()) return Explain(stream.status(), options.run_id);  // the daemon may have been started anew since
  stream_ = *std::move(stream);
  run_id_ = options.run_id, rank_ = options.rank;
  takes_load_batches_ = grant->takes_load_batches();
  generation_ = grant->generation();
  return AttachmentOf(*grant);
}

void DaemonClient::Detach() {
  if (stream_) stream_->Leave();
  stream_.reset();
}

absl::StatusOr<std::vector<uint64_t>> DaemonClient::LoadWeights(absl::Span<const TensorView> tensors, bool replace,
                                                                const std::function<void(uint64_t)>& sent) {
  if (!stream_) return NotAttached("LoadWeights");
  if (auto s = stream_->CheckBetweenSteps("LoadWeights"); !s.ok()) return s;
  auto digests =
      UploadWeights(*connection_, *stream_, {.takes_batches = takes_load_batches_, .replace = replace}, tensors, sent);
  if (!digests.ok()) return Explain(digests.status(), run_id_);
  if (replace) stream_->AwaitEnd(kTellTimeout);
  return digests;
}

absl::Status DaemonClient::Pull(const std::string& run_id, absl::Span<const uint32_t> tensors, const PieceSink& sink,
                                uint64_t snapshot, absl::Span<const uint64_t> digests, const Shards& shards) {
  std::optional<TensorTable> table;  // once it is needed
  std::vector<std::byte> decoded;
  const auto decode = [&](const ServedPiece& piece) -> absl::Status {
    const WireFormat* format = FindFormat(piece.format);
    const uint64_t first = piece.first - FirstHeld(shards, piece.tensor);
    if (format->computes) return sink(piece.tensor, first * format->bytes, piece.codes, piece.step);
    if (!table) {
      const auto run = GetRun(run_id);
      if (!run.ok()) return run.status();
      auto made = TensorTable::Create(run->spec(), 1);
      if (!made.ok()) return made.status();
      table = *std::move(made);
    }
    if (auto s = table->CheckIndex(piece.tensor); !s.ok()) return s;
    const WireTensor& tensor = (*table)[piece.tensor];
    decoded.resize(piece.codes.size() * tensor.landing_element_bytes());
    if (auto s = Decode(piece, tensor, decoded.data()); !s.ok()) return s;
    return sink(piece.tensor, first * tensor.landing_element_bytes(), decoded, piece.step);
  };
  return PullServed(run_id, tensors, decode, snapshot, digests, shards);
}

absl::Status DaemonClient::PullServed(const std::string& run_id, absl::Span<const uint32_t> tensors,
                                      const std::function<absl::Status(const ServedPiece&)>& sink, uint64_t snapshot,
                                      absl::Span<const uint64_t> digests, const Shards& shards) {
  v1::PullRequest request;
  request.set_run_id(run_id);
  request.mutable_tensors()->Add(tensors.begin(), tensors.end());
  request.set_step(snapshot);
  request.mutable_digests()->Add(digests.begin(), digests.end());
  return Explain(PullShards(*this, *connection_, std::move(request), shards, sink), run_id);
}

absl::Status DaemonClient::PullState(const std::string& run_id, absl::Span<const uint32_t> tensors,
                                     absl::Span<const std::string> slots,
                                     const std::function<absl::Status(const ServedPiece&)>& sink, uint64_t snapshot,
                                     const Shards& shards, std::optional<double> average) {
  v1::PullRequest request;
  request.set_run_id(run_id);
  request.mutable_tensors()->Add(tensors.begin(), tensors.end());
  request.mutable_slots()->Add(slots.begin(), slots.end());
  request.set_step(snapshot);
  if (average) request.set_average(*average);
  return Explain(PullShards(*this, *connection_, std::move(request), shards, sink), run_id);
}

absl::StatusOr<v1::TagVersionResponse> DaemonClient::TagVersion(const v1::TagVersionRequest& request) {
  auto tagged = ballast::TagVersion(*connection_, request);
  if (!tagged.ok() && !request.has_version()) return Explain(tagged.status(), request.run_id());
  return tagged;
}

absl::Status DaemonClient::UntagVersion(const std::string& run_id, const std::string& name) {
  return ballast::UntagVersion(*connection_, run_id, name);
}

absl::StatusOr<v1::ListVersionsResponse> DaemonClient::ListVersions(const std::string& run_id) {
  return ballast::ListVersions(*connection_, run_id);
}

absl::Status DaemonClient::PullVersion(const v1::PullRequest& request,
                                       const std::function<absl::Status(const ServedPiece&)>& sink) {
  if (!request.has_version()) return absl::InvalidArgumentError("PullVersion wants a request with version");
  return PullWeights(*connection_, request, nullptr, sink);
}

absl::Status DaemonClient::BindWeights(uint32_t tensor, void* destination, uint64_t bytes) {
  return stream_ ? stream_->BindWeights(tensor, destination, bytes) : NotAttached("BindWeights");
}

absl::Status DaemonClient::BindServed(uint32_t tensor, void* codes, uint64_t bytes, absl::Span<float> scales) {
  return stream_ ? stream_->BindServed(tensor, codes, bytes, scales) : NotAttached("BindServed");
}

absl::Status DaemonClient::BeginStep(const StepValues& values) {
  return stream_ ? stream_->BeginStep(values) : NotAttached("BeginStep");
}

absl::Status DaemonClient::Push(uint32_t tensor, absl::Span<const std::byte> gradient) {
  return stream_ ? stream_->Push(tensor, gradient) : NotAttached("Push");
}

absl::Status DaemonClient::EndMicro(std::optional<double> loss, bool next_is_last) {
  return stream_ ? stream_->EndMicro(loss, next_is_last) : NotAttached("EndMicro");
}

std::future<absl::StatusOr<MeasuredStep>> DaemonClient::MeasureStep(std::optional<double> loss) {
  if (stream_) return stream_->MeasureStep(loss);
  return Ready<MeasuredStep>(NotAttached("MeasureStep"));
}

std::future<absl::StatusOr<StepResult>> DaemonClient::EndStep(std::optional<double> loss, const StepEndValues& values) {
  if (stream_) return stream_->EndStep(loss, values);
  return Ready<StepResult>(NotAttached("EndStep"));
}

absl::StatusOr<bool> DaemonClient::AwaitWeights(uint32_t tensor, double timeout_s) {
  if (!stream_) return NotAttached("AwaitWeights");
  return stream_->AwaitWeights(tensor, absl::Seconds(timeout_s));
}

uint64_t DaemonClient::step() const { return stream_ ? stream_->step() : 0; }

bool DaemonClient::shares_gpu() const { return stream_ && stream_->shares_gpu(); }

absl::Status DaemonClient::status() const { return stream_ ? stream_->status() : absl::OkStatus(); }

}  // namespace ballast
