// What the trainer may say of a step: a daemon that is sent anything else ends the session, so the client refuses it first.
// An immutable value.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "ballast/v1/run.pb.h"
#include "client/cpp/client.h"

namespace ballast {

class StepLimits {
 public:
  StepLimits() = default;
  explicit StepLimits(const v1::RunSpec& spec);

  // INVALID_ARGUMENT names the value, and says what is wanted.
  absl::Status CheckBegin(const StepValues& values) const;
  // Of a step of so many micro-batches.
  absl::Status CheckMicros(const char* call, uint32_t micros) const;
  // FAILED_PRECONDITION: the run's commit is release.
  absl::Status CheckEnd(const StepEndValues& values) const;

 private:
  struct Group {
    std::string rule;
    std::map<std::string, double> hyper;  // as the daemon has filled them in; none: not known
  };

  absl::Status CheckGroups(const char* call, absl::Span<const GroupValues> groups) const;
  absl::Status CheckNorm(const std::optional<double>& max_grad_norm) const;
  absl::Status CheckValues(const std::string& at, const Group& group, const GroupValues& values) const;

  std::string run_id_;
  std::vector<Group> groups_;
  uint32_t most_micros_ = 1;
  bool staged_ = false, clips_tensors_ = false;
};

}  // namespace ballast
