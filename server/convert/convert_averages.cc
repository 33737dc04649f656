// Averages of a run's weights: those that its spec asks for, and the one that a reader does.
#include <algorithm>
#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

#include "server/convert/convert.h"

namespace ballast {
namespace {

using absl::InvalidArgumentError;
using absl::StrCat;

// Shortest text that reads back to the same number: .9999 is not 1.
std::string TextOf(double decay) {
  for (int digits = 1; digits < 17; ++digits) {
    const std::string text = absl::StrFormat("%.*g", digits, decay);
    if (double read = 0; absl::SimpleAtod(text, &read) && read == decay) return text;
  }
  return absl::StrFormat("%.17g", decay);
}

}  // namespace

absl::Status TakeAverages(const v1::RunSpec& spec, RunSpec* made) {
  if (static_cast<size_t>(spec.averages_size()) > kMostAverages) {
    return InvalidArgumentError(
        StrCat("averages has ", spec.averages_size(), " entries; wanted: at most ", kMostAverages));
  }
  for (int i = 0; i < spec.averages_size(); ++i) {
    const double decay = spec.averages(i);
    if (!(decay > 0 && decay < 1)) {
      return InvalidArgumentError(
          StrCat("averages[", i, "] is ", TextOf(decay), "; wanted: a decay above 0 and below 1, as .999"));
    }
    if (static_cast<float>(1 - decay) == 0) {
      return InvalidArgumentError(StrCat("averages[", i, "] is ", TextOf(decay), ", too near to 1 to move at all"));
    }
    if (std::find(made->averages.begin(), made->averages.end(), decay) != made->averages.end()) {
      return InvalidArgumentError(
          StrCat("averages[", i, "] is ", TextOf(decay), ", which is there twice; name each decay once"));
    }
    made->averages.push_back(decay);
  }
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> ToAverage(double decay, const RunSpec& spec) {
  const auto found = std::find(spec.averages.begin(), spec.averages.end(), decay);
  if (found != spec.averages.end()) return static_cast<uint32_t>(found - spec.averages.begin());
  const auto text = [](std::string* out, double d) { absl::StrAppend(out, TextOf(d)); };
  return InvalidArgumentError(
      StrCat("run '", spec.run_id, "' keeps no average of its weights with the decay ", TextOf(decay), "; ",
             spec.averages.empty() ? "it keeps none (RunSpec.averages)"
                                   : StrCat("it keeps ", absl::StrJoin(spec.averages, ", ", text))));
}

}  // namespace ballast
