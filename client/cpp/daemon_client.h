// ballast::Client of one daemon, which has the whole of a run, or one part of it: client.h says what the calls do.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/cpp/client.h"
#include "client/cpp/stream/step_stream.h"
#include "client/cpp/transport/connection.h"

namespace ballast {

// What refuses a call that needs a rank.
absl::Status NotAttached(const char* call);

class DaemonClient final : public Client {
 public:
  static absl::StatusOr<std::unique_ptr<DaemonClient>> Connect(ClientOptions options);
  ~DaemonClient() override { Detach(); }

  const std::string& server() const override;
  absl::StatusOr<v1::CreateRunResponse> CreateRun(const v1::RunSpec& spec) override;
  absl::StatusOr<v1::GetServerResponse> GetServer() override;
  absl::StatusOr<v1::ListRunsResponse> ListRuns() override;
  absl::StatusOr<v1::GetRunResponse> GetRun(const std::string& run_id) override;
  absl::StatusOr<v1::GetHistoryResponse> GetHistory(const std::string& run_id, uint64_t after_step,
                                                    uint32_t most) override;
  absl::StatusOr<v1::DeleteRunResponse> DeleteRun(const std::string& run_id, bool force,
                                                  bool keep_checkpoints) override {
    return DeletePart(run_id, force, keep_checkpoints, /*daemons=*/1);
  }
  absl::StatusOr<v1::RunPlan> Plan(const v1::RunSpec& spec) override;
  absl::StatusOr<v1::AmendRunResponse> AmendRun(const v1::RunSpec& spec) override;
  absl::StatusOr<v1::RewindResponse> Rewind(const v1::RewindRequest& request) override;
  absl::StatusOr<v1::CheckpointResponse> Checkpoint(const std::string& run_id) override;
  absl::StatusOr<v1::TagVersionResponse> TagVersion(const v1::TagVersionRequest& request) override;
  absl::Status UntagVersion(const std::string& run_id, const std::string& name) override;
  absl::StatusOr<v1::ListVersionsResponse> ListVersions(const std::string& run_id) override;
  absl::Status PullVersion(const v1::PullRequest& request,
                           const std::function<absl::Status(const ServedPiece&)>& sink) override;
  absl::StatusOr<v1::ListCheckpointsResponse> ListCheckpoints(const std::string& run_id) override;
  absl::StatusOr<v1::RestoreResponse> Restore(const std::string& run_id, uint64_t step,
                                              const std::string& from) override;
  absl::StatusOr<Attachment> Attach(const AttachOptions& options) override;
  void Detach() override;
  absl::StatusOr<std::vector<uint64_t>> LoadWeights(absl::Span<const TensorView> tensors, bool replace,
                                                    const std::function<void(uint64_t bytes)>& sent) override;
  absl::Status Pull(const std::string& run_id, absl::Span<const uint32_t> tensors,
                    const std::function<absl::Status(uint32_t tensor, uint64_t offset_bytes,
                                                     absl::Span<const std::byte> piece, uint64_t step)>& sink,
                    uint64_t snapshot, absl::Span<const uint64_t> digests, const Shards& shards) override;
  absl::Status PullServed(const std::string& run_id, absl::Span<const uint32_t> tensors,
                          const std::function<absl::Status(const ServedPiece&)>& sink, uint64_t snapshot,
                          absl::Span<const uint64_t> digests, const Shards& shards) override;
  absl::Status PullState(const std::string& run_id, absl::Span<const uint32_t> tensors,
                         absl::Span<const std::string> slots,
                         const std::function<absl::Status(const ServedPiece&)>& sink, uint64_t snapshot,
                         const Shards& shards, std::optional<double> average) override;
  absl::Status BindWeights(uint32_t tensor, void* destination, uint64_t bytes) override;
  absl::Status BindServed(uint32_t tensor, void* codes, uint64_t bytes, absl::Span<float> scales) override;
  absl::Status BeginStep(const StepValues& values) override;
  absl::Status Push(uint32_t tensor, absl::Span<const std::byte> gradient) override;
  absl::Status EndMicro(std::optional<double> loss, bool next_is_last) override;
  std::future<absl::StatusOr<MeasuredStep>> MeasureStep(std::optional<double> loss) override;
  std::future<absl::StatusOr<StepResult>> EndStep(std::optional<double> loss, const StepEndValues& values) override;
  absl::StatusOr<bool> AwaitWeights(uint32_t tensor, double timeout_s) override;
  uint64_t step() const override;
  bool shares_gpu() const override;
  absl::Status status() const override;

  // As DeleteRun, for a caller that deletes the run on so many daemons.
  absl::StatusOr<v1::DeleteRunResponse> DeletePart(const std::string& run_id, bool force, bool keep_checkpoints,
                                                   uint32_t daemons);
  // As Detach, of a client that attaches again: of a session that has ended already the daemon is told nothing.
  void DetachForNow() { stream_.reset(); }
  // The run's, when the rank was attached.
  uint64_t generation() const { return generation_; }
  // Tells people, as ClientOptions::log says.
  void Log(const std::string& line) const { connection_->Log(line); }
  // Waits up to so long until the stream is open, or the client has failed. False: it is lost, and not there again yet.
  bool AwaitConnected(absl::Duration timeout) const { return !stream_ || stream_->AwaitConnected(timeout); }

 private:
  explicit DaemonClient(std::unique_ptr<Connection> connection) : connection_(std::move(connection)) {}

  template <typename Response, typename Stub, typename Request>
  absl::StatusOr<Response> Call(Stub& stub,
                                grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                                const Request& request, absl::Duration timeout = Connection::kCallTimeout);
  // The daemon was found to hold it, by a call that began then.
  void Found(const std::string& run, absl::Time since) {
    found_run_ = run;
    found_since_ = since;
  }
  // Attach is to find this spec there.
  void GoBy(const std::string& run, const std::string& sha256) {
    spec_run_ = run;
    spec_sha256_ = sha256;
  }
  // What NOT_FOUND means of a run that was found before, or of its session, which has heard of it then, too.
  absl::Status Explain(const absl::Status& status, const std::string& run) const;

  const std::unique_ptr<Connection> connection_;
  std::unique_ptr<StepStream> stream_;  // after Attach
  std::string run_id_;                  // likewise; it and the next stay those of the last Attach
  uint32_t rank_ = 0;
  std::string found_run_;
  absl::Time found_since_ = absl::InfiniteFuture();  // none was
  bool takes_load_batches_ = false;                  // likewise; of the daemon
  uint64_t generation_ = 0;                          // likewise; of the run then
  std::string spec_run_, spec_sha256_;
};

}  // namespace ballast
