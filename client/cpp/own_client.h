// ballast::Client for the process that has connected it. In a fork of that its threads are not there, its locks may be held for
// good, and its socket and shared memory are the parent's still: each call is refused there, and its end touches nothing.
// client.h says what the calls do.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/client.h"
#include "client/cpp/stream/ready.h"
#include "client/cpp/transport/fork_watch.h"

namespace ballast {

class OwnClient final : public Client {
 public:
  explicit OwnClient(std::unique_ptr<Client> client) : client_(std::move(client)) {}
  ~OwnClient() override {
    if (!CheckNotForked().ok()) KeepForGood(std::move(client_));
  }

  const std::string& server() const override { return client_->server(); }
  absl::StatusOr<v1::CreateRunResponse> CreateRun(const v1::RunSpec& spec) override {
    return UnlessForked([&] { return client_->CreateRun(spec); });
  }
  absl::StatusOr<v1::GetServerResponse> GetServer() override {
    return UnlessForked([&] { return client_->GetServer(); });
  }
  absl::StatusOr<v1::ListRunsResponse> ListRuns() override {
    return UnlessForked([&] { return client_->ListRuns(); });
  }
  absl::StatusOr<v1::GetRunResponse> GetRun(const std::string& run_id) override {
    return UnlessForked([&] { return client_->GetRun(run_id); });
  }
  absl::StatusOr<v1::GetHistoryResponse> GetHistory(const std::string& run_id, uint64_t after_step,
                                                    uint32_t most) override {
    return UnlessForked([&] { return client_->GetHistory(run_id, after_step, most); });
  }
  absl::StatusOr<v1::DeleteRunResponse> DeleteRun(const std::string& run_id, bool force,
                                                  bool keep_checkpoints) override {
    return UnlessForked([&] { return client_->DeleteRun(run_id, force, keep_checkpoints); });
  }
  absl::StatusOr<v1::RunPlan> Plan(const v1::RunSpec& spec) override {
    return UnlessForked([&] { return client_->Plan(spec); });
  }
  absl::StatusOr<v1::AmendRunResponse> AmendRun(const v1::RunSpec& spec) override {
    return UnlessForked([&] { return client_->AmendRun(spec); });
  }
  absl::StatusOr<v1::RewindResponse> Rewind(const v1::RewindRequest& request) override {
    return UnlessForked([&] { return client_->Rewind(request); });
  }
  absl::StatusOr<v1::CheckpointResponse> Checkpoint(const std::string& run_id) override {
    return UnlessForked([&] { return client_->Checkpoint(run_id); });
  }
  absl::StatusOr<v1::TagVersionResponse> TagVersion(const v1::TagVersionRequest& request) override {
    return UnlessForked([&] { return client_->TagVersion(request); });
  }
  absl::Status UntagVersion(const std::string& run_id, const std::string& name) override {
    return UnlessForked([&] { return client_->UntagVersion(run_id, name); });
  }
  absl::StatusOr<v1::ListVersionsResponse> ListVersions(const std::string& run_id) override {
    return UnlessForked([&] { return client_->ListVersions(run_id); });
  }
  absl::Status PullVersion(const v1::PullRequest& request,
                           const std::function<absl::Status(const ServedPiece&)>& sink) override {
    return UnlessForked([&] { return client_->PullVersion(request, sink); });
  }
  absl::StatusOr<v1::ListCheckpointsResponse> ListCheckpoints(const std::string& run_id) override {
    return UnlessForked([&] { return client_->ListCheckpoints(run_id); });
  }
  absl::StatusOr<v1::RestoreResponse> Restore(const std::string& run_id, uint64_t step,
                                              const std::string& from) override {
    return UnlessForked([&] { return client_->Restore(run_id, step, from); });
  }
  absl::StatusOr<Attachment> Attach(const AttachOptions& options) override {
    return UnlessForked([&] { return client_->Attach(options); });
  }
  void Detach() override {
    if (CheckNotForked().ok()) client_->Detach();
  }
  absl::StatusOr<std::vector<uint64_t>> LoadWeights(absl::Span<const TensorView> tensors, bool replace,
                                                    const std::function<void(uint64_t bytes)>& sent) override {
    return UnlessForked([&] { return client_->LoadWeights(tensors, replace, sent); });
  }
  absl::Status Pull(const std::string& run_id, absl::Span<const uint32_t> tensors,
                    const std::function<absl::Status(uint32_t tensor, uint64_t offset_bytes,
                                                     absl::Span<const std::byte> piece, uint64_t step)>& sink,
                    uint64_t snapshot, absl::Span<const uint64_t> digests, const Shards& shards) override {
    return UnlessForked([&] { return client_->Pull(run_id, tensors, sink, snapshot, digests, shards); });
  }
  absl::Status PullServed(const std::string& run_id, absl::Span<const uint32_t> tensors,
                          const std::function<absl::Status(const ServedPiece&)>& sink, uint64_t snapshot,
                          absl::Span<const uint64_t> digests, const Shards& shards) override {
    return UnlessForked([&] { return client_->PullServed(run_id, tensors, sink, snapshot, digests, shards); });
  }
  absl::Status PullState(const std::string& run_id, absl::Span<const uint32_t> tensors,
                         absl::Span<const std::string> slots,
                         const std::function<absl::Status(const ServedPiece&)>& sink, uint64_t snapshot,
                         const Shards& shards, std::optional<double> average) override {
    return UnlessForked([&] { return client_->PullState(run_id, tensors, slots, sink, snapshot, shards, average); });
  }
  absl::Status BindWeights(uint32_t tensor, void* destination, uint64_t bytes) override {
    return UnlessForked([&] { return client_->BindWeights(tensor, destination, bytes); });
  }
  absl::Status BindServed(uint32_t tensor, void* codes, uint64_t bytes, absl::Span<float> scales) override {
    return UnlessForked([&] { return client_->BindServed(tensor, codes, bytes, scales); });
  }
  absl::Status BeginStep(const StepValues& values) override {
    return UnlessForked([&] { return client_->BeginStep(values); });
  }
  absl::Status Push(uint32_t tensor, absl::Span<const std::byte> gradient) override {
    return UnlessForked([&] { return client_->Push(tensor, gradient); });
  }
  absl::Status EndMicro(std::optional<double> loss, bool next_is_last) override {
    return UnlessForked([&] { return client_->EndMicro(loss, next_is_last); });
  }
  std::future<absl::StatusOr<MeasuredStep>> MeasureStep(std::optional<double> loss) override {
    if (auto s = CheckNotForked(); !s.ok()) return Ready<MeasuredStep>(s);
    return client_->MeasureStep(loss);
  }
  std::future<absl::StatusOr<StepResult>> EndStep(std::optional<double> loss, const StepEndValues& values) override {
    if (auto s = CheckNotForked(); !s.ok()) return Ready<StepResult>(s);
    return client_->EndStep(loss, values);
  }
  absl::StatusOr<bool> AwaitWeights(uint32_t tensor, double timeout_s) override {
    return UnlessForked([&] { return client_->AwaitWeights(tensor, timeout_s); });
  }
  uint64_t step() const override { return CheckNotForked().ok() ? client_->step() : 0; }
  bool shares_gpu() const override { return CheckNotForked().ok() && client_->shares_gpu(); }
  absl::Status status() const override {
    return UnlessForked([&] { return client_->status(); });
  }

 private:
  std::unique_ptr<Client> client_;
};

}  // namespace ballast
