// Whether another step of a run may begin, and what a client is told where it may not. A value; thread-compatible.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"

#include "server/step/step_machine.h"

namespace ballast {

class StepGate {
 public:
  // False, after steps were made: they were replaced in part.
  void set_weights_loaded(bool loaded) { weights_loaded_ = loaded; }
  bool weights_loaded() const { return weights_loaded_; }
  // What is said then of tensors that were added and never had weights; empty: there are none.
  void set_lacks_added(std::string why) { lacks_added_ = std::move(why); }
  bool lacks_added() const { return !lacks_added_.empty(); }
  // The weights are being replaced, or the run amended: a StepBegin is not to be taken yet.
  void set_replacing(bool replacing) { replacing_ = replacing; }
  bool replacing() const { return replacing_; }
  // The daemon is shutting down: the open step goes on, and no other begins.
  void Drain() { draining_ = true; }
  // Likewise, for `why`, until GoBackTo. False, and nothing changes: `why` is empty, or it was stopped before.
  bool Stop(std::string why) {
    if (why.empty() || !stopped_.empty()) return false;
    stopped_ = std::move(why);
    return true;
  }
  // After a rewind: whether it was stopped when the snapshot was taken.
  void GoBackTo(std::string stopped) { stopped_ = std::move(stopped); }

  bool draining() const { return draining_; }
  const std::string& stopped() const { return stopped_; }  // why; empty: it is not

  // What a run without weights says that had some, or has some.
  absl::Status lacking() const {
    if (lacks_added()) return absl::FailedPreconditionError(lacks_added_);
    return absl::FailedPreconditionError(
        "the weights were replaced in part, by a LoadState that was cut or refused: send all of the tensors that it "
        "had "
        "begun with another (LoadStateRequest.replace), or rewind the run");
  }
  // FAILED_PRECONDITION or UNAVAILABLE if a rank's StepBegin of this step comes to nothing.
  absl::Status Check(const StepMachine& machine, uint64_t step) const {
    if (!weights_loaded_ && (machine.step() > 1 || lacks_added())) return lacking();
    if (!weights_loaded_) {
      return absl::FailedPreconditionError("StepBegin before the weights are loaded; send them with LoadState first");
    }
    if (machine.step_open()) return absl::OkStatus();
    if (draining_) return absl::UnavailableError("the daemon is shutting down; no new step begins");
    if (!stopped_.empty() && step == machine.step()) return absl::FailedPreconditionError(stopped_);
    return absl::OkStatus();
  }

 private:
  bool weights_loaded_ = false, replacing_ = false;
  std::string lacks_added_;
  bool draining_ = false;
  std::string stopped_;
};

}  // namespace ballast
