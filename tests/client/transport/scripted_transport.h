// A transport without a daemon, for tests of StepStream: the test says what comes in, sees what went out, and can make
// writes wait. Thread-safe.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"

#include "client/cpp/transport/transport.h"
#include "client/cpp/wire/tensor_table.h"

namespace ballast {

class Script {
 public:
  // From now on writes of gradients wait, as for room in a socket, until they are let go on.
  void HoldGradients() { Set(&held_, true); }
  void LetGradientsGo() { Set(&held_, false); }
  void AwaitHeldWrite() {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&waits_));
  }
  void Say(v1::TrainResponse response) {
    absl::MutexLock lock(&mu_);
    said_.push_back(std::move(response));
  }
  // Waits until so many messages were written, and returns them.
  std::vector<v1::TrainRequest> AwaitWritten(size_t messages) {
    absl::MutexLock lock(&mu_);
    const auto there = [&] { return written_.size() >= messages; };
    mu_.Await(absl::Condition(&there));
    return written_;
  }

 private:
  friend class ScriptedTransport;
  void Set(bool* flag, bool value) {
    absl::MutexLock lock(&mu_);
    *flag = value;
  }

  absl::Mutex mu_;
  bool held_ = false, waits_ = false, over_ = false;
  std::deque<v1::TrainResponse> said_;
  std::vector<v1::TrainRequest> written_;
};

class ScriptedTransport final : public Transport {
 public:
  explicit ScriptedTransport(std::shared_ptr<Script> script) : script_(*script), kept_(std::move(script)) {}

  void Start(const v1::TrainRequest&) override {
    v1::TrainResponse opened;
    opened.mutable_opened();
    script_.Say(opened);
  }
  bool Write(v1::TrainRequest* request, bool) override {
    if (request->has_gradient()) FillChecksum(request->mutable_gradient());
    absl::MutexLock lock(&script_.mu_);
    const auto free = [this] { return !script_.held_ || script_.over_; };
    script_.waits_ = request->has_gradient() && script_.held_;
    if (script_.waits_) script_.mu_.Await(absl::Condition(&free));
    script_.waits_ = false;
    script_.written_.push_back(*request);
    return !script_.over_;
  }
  bool WritesDone() override {
    Cancel();
    return true;
  }
  bool Read(v1::TrainResponse* response, absl::Span<const std::byte>* data) override {
    absl::MutexLock lock(&script_.mu_);
    const auto there = [this] { return !script_.said_.empty() || script_.over_; };
    script_.mu_.Await(absl::Condition(&there));
    if (script_.over_) return false;
    *response = std::move(script_.said_.front());
    script_.said_.pop_front();
    *data = BytesOf(response->weights().data());
    return true;
  }
  void Cancel() override { script_.Set(&script_.over_, true); }
  absl::Status Finish() override { return absl::CancelledError("the script is over"); }

 private:
  Script& script_;
  const std::shared_ptr<Script> kept_;
};

}  // namespace ballast
