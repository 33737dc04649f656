#include "client/cpp/ctl/plan_spec.h"

#include <fstream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "client/cpp/wire/format_rules.h"

namespace ballast::ctl {
namespace {

// 8e9 and 8000000000 alike.
absl::StatusOr<int64_t> Count(const char* flag, const std::string& text) {
  double value = 0;
  if (absl::SimpleAtod(text, &value) && value >= 1 && value < 1e15 &&
      value == static_cast<double>(static_cast<int64_t>(value))) {
    return static_cast<int64_t>(value);
  }
  return absl::InvalidArgumentError(absl::StrCat("--", flag, " is '", text, "'; wanted a whole number, 1 or more"));
}

// Of a number that the spec has room for, how many are too many is the daemon's to say.
template <typename Number>
absl::StatusOr<uint32_t> Fitting(const char* flag, const absl::StatusOr<Number>& count) {
  if (!count.ok()) return count.status();
  if (std::in_range<uint32_t>(*count)) return static_cast<uint32_t>(*count);
  return absl::InvalidArgumentError(absl::StrCat("--", flag, " is ", *count, ", more than any run can have"));
}

// The parameters spread evenly over vectors.
absl::Status AddEqualTensors(const Invocation& invocation, v1::RunSpec* spec) {
  const auto parameters = Count("parameters", invocation.Get("parameters", ""));
  if (!parameters.ok()) return parameters.status();
  const auto tensors = Count("tensors", invocation.Get("tensors", "100"));
  if (!tensors.ok()) return tensors.status();
  if (*tensors > *parameters || *tensors > 1'000'000) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tensors is ", *tensors, "; wanted at most --parameters (", *parameters, ") and 1000000"));
  }
  for (int64_t i = 0; i < *tensors; ++i) {
    v1::TensorSpec* tensor = spec->add_tensors();
    tensor->set_name(absl::StrCat("tensor.", i));
    tensor->add_shape(*parameters / *tensors + (i < *parameters % *tensors ? 1 : 0));
  }
  return absl::OkStatus();
}

absl::Status AddShape(const std::string& line, v1::RunSpec* spec) {
  const std::vector<std::string> words = absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
  v1::TensorSpec* tensor = spec->add_tensors();
  if (words.size() != 2) return absl::InvalidArgumentError("wanted: NAME SHAPE, as in `layers.0.w 4096x1024`");
  tensor->set_name(words[0]);
  for (const auto part : absl::StrSplit(words[1], 'x')) {
    int64_t extent = 0;
    if (!absl::SimpleAtoi(part, &extent) || extent < 1) {
      return absl::InvalidArgumentError(absl::StrCat("shape '", words[1], "'; wanted whole numbers joined by x"));
    }
    tensor->add_shape(extent);
  }
  return absl::OkStatus();
}

absl::Status AddShapesOf(const std::string& path, v1::RunSpec* spec) {
  std::ifstream file(path);
  if (!file) return absl::InvalidArgumentError(absl::StrCat("--shape-list ", path, ": the file cannot be read"));
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos || line[0] == '#') continue;
    if (auto s = AddShape(line, spec); !s.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(path, " line ", number, ": ", s.message()));
    }
  }
  if (spec->tensors().empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": no tensors in it"));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<FormatRule>> FormatRules(const std::string& text) {
  std::vector<FormatRule> rules;
  for (const auto part : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    const std::vector<std::string> sides = absl::StrSplit(part, '=');
    const std::vector<std::string> formats = absl::StrSplit(sides.back(), '/');
    if (sides.size() != 2 || sides[0].empty() || formats.size() != 2) {
      return absl::InvalidArgumentError(absl::StrCat("--formats has '", part, "'; wanted PATTERN=MASTER/STATE"));
    }
    rules.push_back({.pattern = sides[0], .master = formats[0], .state = formats[1]});
  }
  return rules;
}

absl::Status TakeAverages(const Invocation& invocation, v1::RunSpec* spec) {
  for (const auto part : absl::StrSplit(invocation.Get("averages", ""), ',', absl::SkipEmpty())) {
    double decay = 0;
    if (!absl::SimpleAtod(part, &decay)) {
      return absl::InvalidArgumentError(absl::StrCat("--averages has '", part, "'; wanted decays, as .999,.9999"));
    }
    spec->add_averages(decay);
  }
  return absl::OkStatus();
}

absl::Status TakeSteps(const Invocation& invocation, v1::RunSpec* spec) {
  const auto ranks = Fitting("ranks", Count("ranks", invocation.Get("ranks", "1")));
  if (!ranks.ok()) return ranks.status();
  const auto micros = Fitting("accumulation", Count("accumulation", invocation.Get("accumulation", "1")));
  if (!micros.ok()) return micros.status();
  spec->set_ranks(*ranks);
  spec->set_accumulation(*micros);
  const std::string commit = invocation.Get("commit", "release");
  if (commit != "release" && commit != "staged") {
    return absl::InvalidArgumentError(absl::StrCat("--commit is '", commit, "'; wanted release or staged"));
  }
  const auto snapshots = Fitting("snapshots", WholeNumber("--snapshots", invocation.Get("snapshots", "0")));
  if (!snapshots.ok()) return snapshots.status();
  if (*snapshots > 0) spec->mutable_rewind()->set_snapshots(*snapshots);
  const auto readers = Fitting("readers", WholeNumber("--readers", invocation.Get("readers", "0")));
  if (!readers.ok()) return readers.status();
  if (*readers > 0) spec->mutable_follow()->set_readers(*readers);
  const auto tags = Fitting("tags", WholeNumber("--tags", invocation.Get("tags", "0")));
  if (!tags.ok()) return tags.status();
  for (const auto format : absl::StrSplit(invocation.Get("reader-formats", ""), ',', absl::SkipEmpty())) {
    spec->mutable_follow()->add_formats(std::string(format));
  }
  if (*tags > 0) spec->mutable_follow()->set_tags(*tags);
  spec->set_commit(commit == "staged" ? v1::COMMIT_MODE_STAGED : v1::COMMIT_MODE_RELEASE);
  return absl::OkStatus();
}

}  // namespace

std::vector<Flag> PlanFlags() {
  return {{"parameters", "N", "how many, as 8e9; spread evenly over --tensors"},
          {"tensors", "N", "default 100"},
          {"shape-list", "FILE", "instead of both: a line a tensor, NAME SHAPE, as `layers.0.w 4096x1024`"},
          {"dtype", "FORMAT", "what the trainer computes in: fp32, bf16 (default), fp16"},
          {"serving", "FORMAT", "what weights return in: also fp8-e4m3, int8-row, int8-tensor; default: the dtype"},
          {"gradient", "FORMAT", "what gradients are sent in: also fp8-e5m2; default: the dtype"},
          {"rule", "NAME", "the optimizer; default adamw"},
          {"master", "FORMAT", "of the weights in the daemon; default split24, where the rule has it"},
          {"state", "FORMAT", "of momentum and variance; default companded8, where the rule has it"},
          {"rounding", "MODE", "stochastic (default) or nearest"},
          {"formats", "RULES", "by name, first match: PATTERN=MASTER/STATE,..., as `*embed*=fp32/fp32`"},
          {"ranks", "N", "trainers, at most; default 1"},
          {"accumulation", "N", "micro-batches a step, at most; default 1"},
          {"commit", "MODE", "release (default) or staged, which keeps all gradients until they are judged"},
          {"snapshots", "N", "of past steps, in host memory, to rewind to; default 0"},
          {"journal", "", "of its steps, by durability journal or journal_sync: counts what a step writes to the disk"},
          {"readers", "N", "who follow the run at a time, as `ballastctl follow` does; default 0"},
          {"reader-formats", "FORMATS", "what they may follow it in beside --serving, as bf16,fp8-e4m3; default none"},
          {"tags", "N", "versions of the weights that may have names at a time, as `ballastctl tag` gives; default 0"},
          {"averages", "DECAYS", "averages of the weights that the daemon keeps, as .999,.9999; default none"}};
}

absl::StatusOr<v1::RunSpec> PlanSpec(const Invocation& invocation) {
  if (invocation.Has("parameters") == invocation.Has("shape-list")) {
    return absl::InvalidArgumentError("plan wants --parameters N or --shape-list FILE");
  }
  v1::RunSpec spec;
  spec.set_run_id("plan");
  const absl::Status added = invocation.Has("parameters") ? AddEqualTensors(invocation, &spec)
                                                          : AddShapesOf(invocation.Get("shape-list", ""), &spec);
  if (!added.ok()) return added;
  for (v1::TensorSpec& tensor : *spec.mutable_tensors()) tensor.set_dtype(invocation.Get("dtype", "bf16"));
  if (auto taken = TakeSteps(invocation, &spec); !taken.ok()) return taken;
  if (invocation.Has("journal")) spec.mutable_checkpoint()->set_durability(v1::DURABILITY_MODE_JOURNAL);
  if (auto taken = TakeAverages(invocation, &spec); !taken.ok()) return taken;
  v1::GroupSpec* group = spec.add_groups();
  group->set_rule(invocation.Get("rule", "adamw"));
  group->set_master(invocation.Get("master", ""));
  group->set_state(invocation.Get("state", ""));
  group->set_serving(invocation.Get("serving", ""));
  group->set_gradient(invocation.Get("gradient", ""));
  group->set_rounding(invocation.Get("rounding", "stochastic"));
  const auto rules = FormatRules(invocation.Get("formats", ""));
  if (!rules.ok()) return rules.status();
  if (auto applied = ApplyFormatRules(*rules, &spec); !applied.ok()) return applied.status();
  return spec;
}

}  // namespace ballast::ctl
