// What a step measures, as simulated daemons and ranks tell it each other: a number for each tensor, by which all judge.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "ballast/v1/trainer.pb.h"
#include "client/cpp/client.h"
#include "server/step/step_events.h"
#include "tests/server/step/step_simulator_checker.h"

namespace ballast::sim {

// One tensor in so many is not finite.
inline constexpr uint64_t kNonfinite = 60;

// `squares`: by tensor; NaN: it has no gradient.
inline MeasuredStep MeasureOf(std::vector<double> squares) {
  MeasuredStep measured;
  for (uint32_t i = 0; i < squares.size(); ++i) {
    if (std::isnan(squares[i]) || static_cast<uint64_t>(squares[i]) % kNonfinite != 0) continue;
    if (measured.nonfinite_tensors++ == 0) measured.first_nonfinite = i;
  }
  measured.squares = std::move(squares);
  return measured;
}

// To the bit.
inline std::string TextOf(const v1::WholeMeasure& whole) {
  return absl::StrFormat("norm = %a\nnonfinite = %u\nfirst = %s", whole.grad_norm(), whole.nonfinite_tensors(),
                         whole.first_name());
}

// The same for the same text.
inline uint64_t DrawBy(const std::string& whole) {
  uint64_t bits = 0;
  for (const char c : whole) bits = Mix(bits, static_cast<unsigned char>(c));
  return bits;
}

// Whether all trainers discard a step that measures this.
inline bool DiscardsBy(const std::string& whole) { return DrawBy(whole) % 13 == 1; }

inline event::Verdict JudgeWhole(const std::string& whole) {
  if (whole.find("nonfinite = 0") == std::string::npos) return {.outcome = Outcome::kAborted, .reason = "nonfinite"};
  if (DrawBy(whole) % 4 == 0) return {.outcome = Outcome::kSkipped, .reason = "overflow"};
  return {};
}

}  // namespace ballast::sim
