#include "client/cpp/ctl/run_text.h"

#include "absl/strings/ascii.h"
#include "absl/strings/strip.h"

namespace ballast::ctl {

std::string StateName(v1::RunState state) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::RunState_Name(state), "RUN_STATE_"));
}

std::string OutcomeName(v1::StepOutcome outcome) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::StepOutcome_Name(outcome), "STEP_OUTCOME_"));
}

uint64_t StoredBytes(const v1::ByteCounts& bytes) { return bytes.weights() + bytes.momentum() + bytes.variance(); }

uint64_t TotalBytes(const v1::ByteCounts& bytes) {
  return StoredBytes(bytes) + bytes.gradients() + bytes.staging() + bytes.snapshots() + bytes.client_state();
}

}  // namespace ballast::ctl
