// A scripted daemon for the client's tests: one run, one rank, chunks of a few elements, and a cut, a refusal or a
// silence wherever a test wants one. Its "optimizer" adds the step's number to every byte of the gradient.
// Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "ballast/v1/admin.grpc.pb.h"
#include "ballast/v1/trainer.grpc.pb.h"

namespace ballast {

// The run "r" of all tests: a [10] fp32, b [2,2] fp32, c scalar fp32, d [2,3] bf16.
v1::RunSpec FakeSpec();

// What the fake's optimizer makes of a gradient.
std::string Updated(const std::string& gradient, uint64_t step);

struct FakeOptions {
  v1::RunSpec spec = FakeSpec();
  uint64_t chunk_elements = 4;
  uint64_t credit_bytes = 1 << 20;
  double lease_s = 0;
  static constexpr int kNever = std::numeric_limits<int>::max();
  // The stream ends with UNAVAILABLE at this message of all Train streams, counted from 0.
  int cut_at_received = kNever;  // it is lost
  int cut_at_sent = kNever;      // likewise
  // The same for all other calls. Their moments are counted together from 0: a request or a message of LoadState comes
  // in, or an answer or a message of Pull is about to go out.
  int cut_at_moment = kNever;
  std::set<int> also_cut_at_moments = {};
  // The outcome of every step; tensors in tensors_not_applied get no weights.
  v1::StepResult result = {};
  bool answers_open = true;
  bool answers_step_end = true;
  bool returns_credit_late = false;  // only when the window is full
  bool damages_weights = false;
  bool joins_small = false;                   // takes SmallGradients, and sends weights of one chunk as SmallWeights
  std::map<uint32_t, uint64_t> back_at = {};  // tensors that have these digests again after the first message of Pull
  bool acknowledges = true;
  bool has_storage = false;
  v1::DurabilityStatus durability = {};  // of the run, where there is storage
  std::vector<v1::StoredCheckpoint> stored = {};
};

class FakeDaemon final : public v1::TrainerService::Service {
 public:
  explicit FakeDaemon(FakeOptions options = {});
  ~FakeDaemon() override;

  const std::string& address() const { return address_; }
  void Shutdown();  // as if it was killed

  // An answer to the next call, before the ordinary ones. retry_after_ms: trailing metadata; 0: none.
  struct Refusal {
    grpc::Status status;
    int retry_after_ms = 0;
  };
  void RefuseCreateRun(Refusal refusal) { RefuseNext(&FakeDaemon::creation_refusals_, std::move(refusal)); }
  void RefuseAttach(Refusal refusal) { RefuseNext(&FakeDaemon::refusals_, std::move(refusal)); }
  void RefuseTrain(Refusal refusal) { RefuseNext(&FakeDaemon::train_refusals_, std::move(refusal)); }
  void RefuseLoad(Refusal refusal) { RefuseNext(&FakeDaemon::load_refusals_, std::move(refusal)); }
  void RefusePull(Refusal refusal) { RefuseNext(&FakeDaemon::pull_refusals_, std::move(refusal)); }
  void RefuseGetServer(Refusal refusal) { RefuseNext(&FakeDaemon::server_refusals_, std::move(refusal)); }
  void RefuseDeleteRun(Refusal refusal) { RefuseNext(&FakeDaemon::deletion_refusals_, std::move(refusal)); }
  void RefuseListRuns(Refusal refusal) { RefuseNext(&FakeDaemon::list_refusals_, std::move(refusal)); }
  void CutLoads();  // each LoadState, from now on
  // Ends the open stream at its next message, and NOT_FOUND from then on: a daemon started anew.
  void ForgetRun();
  // The same, but a run of that name is there at this step, for an Attach without a token: from the disk, or another one.
  void ReadRunBack(uint64_t step, const std::string& restored = "/disk/checkpoint-3");
  // Is started anew, and has read the run back at this step, when the next stream opens: its session is not known.
  void RestartAtTrain(uint64_t step) {
    absl::MutexLock lock(&mu_);
    restarts_at_ = step;
  }
  // Goes on at this step, as if the steps before it had closed meanwhile, ABORTED, for the other ranks.
  void SetStep(uint64_t step) {
    absl::MutexLock lock(&mu_);
    for (; step_ < step; ++step_) {
      v1::StepResult& closed = missed_.emplace_back();
      closed.set_step(step_);
      closed.set_outcome(v1::STEP_OUTCOME_ABORTED);
    }
    open_ = false;
    held_.clear();
    updated_.clear();
  }
  void ForgetMissed() {  // the result of the first of them
    absl::MutexLock lock(&mu_);
    missed_.erase(missed_.begin());
  }
  void SetBack(uint64_t step) {  // as no daemon does
    absl::MutexLock lock(&mu_);
    SetBackTo(step);
  }
  void CutNow();  // ends the open stream with CANCELLED
  // Sends the response before the answer to the next message.
  void Inject(v1::TrainResponse response);

  struct Seen {
    std::vector<v1::AttachRequest> attaches;
    std::vector<v1::TrainRequest> requests;  // without the gradients' data
    int received = 0;
    int sent = 0;
    int moments = 0;              // as in cut_at_moment
    int pulled = 0;               // messages of Pull
    int creations = 0;            // calls of CreateRun
    int duplicates = 0;           // chunks sent although held
    int joined = 0;               // that came in SmallGradients
    int clean_ends = 0;           // streams ended by WritesDone
    uint64_t most_under_way = 0;  // bytes received and not credited
    std::map<uint32_t, std::string> uploaded;
    std::vector<v1::StepEnd> ends;
    int checkpoints = 0;             // calls of Checkpoint
    std::vector<uint64_t> restores;  // steps asked for
    std::vector<std::string> restored_from = {};
    std::vector<v1::DeleteRunRequest> deletions;
  };
  Seen seen() const;
  void AwaitReceived(int messages) const;
  void AwaitStreamEnd() const;

 private:
  class Admin;
  using Stream = grpc::ServerReaderWriter<v1::TrainResponse, v1::TrainRequest>;

  grpc::Status CreateRun(grpc::ServerContext*, const v1::CreateRunRequest*, v1::CreateRunResponse*) override;
  grpc::Status Attach(grpc::ServerContext*, const v1::AttachRequest*, v1::AttachResponse*) override;
  grpc::Status LoadState(grpc::ServerContext*, grpc::ServerReader<v1::LoadStateRequest>*,
                         v1::LoadStateResponse*) override;
  grpc::Status Train(grpc::ServerContext*, Stream*) override;
  grpc::Status Pull(grpc::ServerContext*, const v1::PullRequest*, grpc::ServerWriter<v1::Weights>*) override;

  // False: the call is cut here.
  bool Passes();
  static grpc::Status Cut() { return {grpc::StatusCode::UNAVAILABLE, "Connection reset by the test"}; }
  void SetBackTo(uint64_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    step_ = step;
    open_ = false;
  }
  grpc::Status Grant(grpc::ServerContext*, const v1::AttachRequest&, v1::AttachResponse*);
  void RefuseNext(std::deque<Refusal> FakeDaemon::*calls, Refusal refusal) {
    absl::MutexLock lock(&mu_);
    (this->*calls).push_back(std::move(refusal));
  }
  static grpc::Status Tell(grpc::ServerContext*, std::deque<Refusal>* refusals);
  using Responses = std::vector<v1::TrainResponse>;
  grpc::Status Restart() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  grpc::Status Take(const v1::TrainRequest& request, Responses* out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  grpc::Status OnOpen(const v1::Open& open, Responses* out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  grpc::Status OnBegin(const v1::StepBegin& begin) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  grpc::Status OnGradient(const v1::Gradient& gradient, Responses* out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  grpc::Status OnSmallGradients(const v1::SmallGradients& small, Responses* out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  grpc::Status CheckWhole() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Close(Responses* out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Credit(uint64_t bytes, Responses* out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SendWeights(uint32_t tensor, uint64_t step, Responses* out) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool applies(uint32_t tensor) const;
  uint64_t chunks(uint32_t tensor) const;
  uint64_t element_bytes(uint32_t tensor) const;
  uint64_t elements(uint32_t tensor) const;

  const FakeOptions options_;
  mutable absl::Mutex mu_;
  Seen seen_ ABSL_GUARDED_BY(mu_);
  std::deque<Refusal> refusals_ ABSL_GUARDED_BY(mu_), train_refusals_ ABSL_GUARDED_BY(mu_);
  std::deque<Refusal> load_refusals_ ABSL_GUARDED_BY(mu_), deletion_refusals_ ABSL_GUARDED_BY(mu_);
  std::deque<Refusal> pull_refusals_ ABSL_GUARDED_BY(mu_), creation_refusals_ ABSL_GUARDED_BY(mu_);
  std::deque<Refusal> server_refusals_ ABSL_GUARDED_BY(mu_), list_refusals_ ABSL_GUARDED_BY(mu_);
  bool cuts_loads_ ABSL_GUARDED_BY(mu_) = false;
  bool loaded_here_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<uint64_t> digests_ ABSL_GUARDED_BY(mu_);
  std::deque<v1::TrainResponse> injected_ ABSL_GUARDED_BY(mu_);
  bool forgot_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<uint64_t> read_back_ ABSL_GUARDED_BY(mu_), restarts_at_ ABSL_GUARDED_BY(mu_);
  std::string restored_ ABSL_GUARDED_BY(mu_);
  int streams_ ABSL_GUARDED_BY(mu_) = 0;
  grpc::ServerContext* context_ ABSL_GUARDED_BY(mu_) = nullptr;  // of the latest stream

  uint64_t step_ ABSL_GUARDED_BY(mu_) = 1;
  bool open_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<bool> absent_ ABSL_GUARDED_BY(mu_);  // as the micro-batch's end said
  std::string begin_ ABSL_GUARDED_BY(mu_);
  std::map<std::pair<uint32_t, uint64_t>, std::string> held_ ABSL_GUARDED_BY(mu_);
  std::map<uint32_t, std::string> updated_ ABSL_GUARDED_BY(mu_);  // of the open or the last closed step
  std::optional<v1::StepResult> last_result_ ABSL_GUARDED_BY(mu_);
  std::vector<v1::StepResult> missed_ ABSL_GUARDED_BY(mu_);  // by SetStep, to be told with the next stream
  uint64_t under_way_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t taken_ ABSL_GUARDED_BY(mu_) = 0;  // gradients of the stream
  std::string client_state_ ABSL_GUARDED_BY(mu_);

  std::unique_ptr<Admin> admin_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

}  // namespace ballast
