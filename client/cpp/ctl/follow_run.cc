// `ballastctl follow`: a run's weights as files, version after version.
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/followed_files.h"
#include "client/cpp/ctl/table.h"
#include "client/cpp/follow/subscriber.h"

namespace ballast::ctl {
namespace {

constexpr double kReconnectS = 15;  // unless --timeout says otherwise
constexpr double kWaitS = 3600;     // between two looks at whether a version is there
constexpr int kColumns[] = {8, 9, 12, 12, 10};

struct FollowFlags {
  std::string out;
  std::string tag = {};  // one version alone
  uint64_t every = 1, versions = 0;
  FollowedFiles::Kept kept = {};
  std::optional<double> average = {};
  std::string format = {};
  double wait_for_run_s = 0;
};

absl::StatusOr<FollowFlags> FlagsOf(const Invocation& invocation) {
  FollowFlags flags{.out = invocation.Get("out", "")};
  if (flags.out.empty()) {
    return absl::InvalidArgumentError("follow wants --out DIR: the folder that gets a file for each version");
  }
  for (const auto& [name, number] : {std::pair("every", &flags.every),
                                     {"versions", &flags.versions},
                                     {"retain", &flags.kept.retain},
                                     {"changes", &flags.kept.changes}}) {
    const auto given = WholeNumber(absl::StrCat("--", name), invocation.Get(name, absl::StrCat(*number)));
    if (!given.ok()) return given.status();
    *number = *given;
  }
  flags.tag = invocation.Get("tag", "");
  if (!flags.tag.empty()) {
    for (const char* other : {"every", "versions", "changes", "average", "format"}) {
      if (!invocation.Has(other)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("--tag is one version of the weights, alone: leave out --", other));
    }
    flags.versions = 1;
  }
  if (double decay = 0; invocation.Has("average")) {
    const std::string given = invocation.Get("average", "");
    if (!absl::SimpleAtod(given, &decay)) {
      return absl::InvalidArgumentError(absl::StrCat("--average is '", given, "'; wanted a decay, as .999"));
    }
    flags.average = decay;
  }
  flags.format = invocation.Get("format", "");
  const std::string wait = invocation.Get("wait-for-run", "0");
  if (!absl::SimpleAtod(wait, &flags.wait_for_run_s) || !(flags.wait_for_run_s >= 0 && flags.wait_for_run_s <= 1e6)) {
    return absl::InvalidArgumentError(absl::StrCat("--wait-for-run is '", wait, "'; wanted seconds, from 0 to 1e6"));
  }
  if (flags.kept.retain == 0) {
    return absl::InvalidArgumentError("--retain is 0; wanted how many whole files are kept, 1 or more");
  }
  return flags;
}

std::string Line(const std::vector<std::string>& cells) {
  std::string line;
  for (size_t i = 0; i < cells.size(); ++i) {
    absl::StrAppend(&line, i == 0 ? "" : "  ");
    if (i < std::size(kColumns)) {
      absl::StrAppendFormat(&line, "%*s", kColumns[i], cells[i]);
    } else {
      line += cells[i];
    }
  }
  return line;
}

double ChangedRatio(const FollowedVersion& version) {
  return static_cast<double>(version.changed_elements) / static_cast<double>(std::max<uint64_t>(1, version.elements));
}

std::string TextLine(const FollowedVersion& version, const std::string& file) {
  return Line({absl::StrCat(version.step), absl::StrFormat("%.3f %%", 100 * ChangedRatio(version)),
               Bytes(version.received_bytes), Bytes(version.whole_bytes), Duration(version.StalenessSeconds()), file});
}

// An object a line.
std::string JsonLine(const FollowedVersion& version, const std::string& file) {
  google::protobuf::Struct answer;
  auto& fields = *answer.mutable_fields();
  fields["step"].set_number_value(static_cast<double>(version.step));
  fields["generation"].set_number_value(static_cast<double>(version.generation));
  fields["changed_ratio"].set_number_value(ChangedRatio(version));
  fields["received_bytes"].set_number_value(static_cast<double>(version.received_bytes));
  fields["whole_bytes"].set_number_value(static_cast<double>(version.whole_bytes));
  fields["skipped"].set_number_value(static_cast<double>(version.skipped));
  fields["behind_s"].set_number_value(version.StalenessSeconds());
  fields["file"].set_string_value(file);
  std::string json;
  return google::protobuf::util::MessageToJsonString(answer, &json).ok() ? json : "{}";
}

int Follow(const Invocation& invocation, const FollowFlags& flags, FollowedFiles& files, Subscriber& subscriber) {
  if (!invocation.json) invocation.out << Line({"STEP", "CHANGED", "RECEIVED", "OF", "BEHIND", "FILE"}) << std::endl;
  for (uint64_t written = 0; flags.versions == 0 || written < flags.versions;) {
    const auto version = subscriber.Next(kWaitS);
    if (!version.ok()) return Fail(invocation, version.status());
    if (!*version) continue;
    const auto file = files.Write(subscriber, **version);
    if (!file.ok()) return Fail(invocation, file.status());
    const std::string name = file->string();
    invocation.out << (invocation.json ? JsonLine(**version, name) : TextLine(**version, name)) << std::endl;
    if (!invocation.out) return kRefused;  // main says why
    ++written;
  }
  return kOk;
}

int FollowRun(const Invocation& invocation) {
  const auto flags = FlagsOf(invocation);
  if (!flags.ok()) return Misused(invocation.err, flags.status(), "follow");
  const std::string& run = invocation.arguments[0];
  auto options = OptionsOf(invocation);
  if (!options.ok()) return Fail(invocation, options.status());
  if (!invocation.Has("timeout")) options->reconnect_timeout_s = kReconnectS;
  const auto subscriber = Subscriber::Open(*std::move(options), {.run_id = run,
                                                                 .every = flags->every,
                                                                 .marks_changed = flags->kept.changes > 0,
                                                                 .tag = flags->tag,
                                                                 .average = flags->average,
                                                                 .format = flags->format,
                                                                 .wait_for_run_s = flags->wait_for_run_s});
  if (!subscriber.ok()) return Fail(invocation, InCommandLine(subscriber.status()));
  auto files = FollowedFiles::Open(flags->out, run, flags->kept);
  if (!files.ok()) return Fail(invocation, files.status());
  return Follow(invocation, *flags, *files, **subscriber);
}

}  // namespace

Command FollowCommand() {
  return {
      .name = "follow",
      .arguments = {"RUN"},
      .summary = "keep up with a run's weights, as safetensors files, until it is deleted or Ctrl-C",
      .details =
          "Each version becomes DIR/step-<step>.safetensors, in the tensors' own dtypes, with run, step and "
          "generation\n"
          "in its metadata; it is there whole or not at all. A line tells of it: how many elements have changed since\n"
          "the one before, how many bytes have come for it, of how many if all had, and how long ago its step closed.\n"
          "With --changes up to N versions after each whole one become DIR/step-<step>.changes.safetensors: "
          "NAME.indices\n"
          "and NAME.values of each tensor, flat, with base_step in the metadata: put over the version before they "
          "make\n"
          "this one. They are what vLLM's CheckpointWeightPatch wants.\n"
          "The run needs follow in its spec. One that reads more slowly than versions are made gets fewer.\n",
      .flags = {{"out", "DIR", "the folder; made if need be"},
                {"every", "N", "no version nearer to the last one than so many steps; 1"},
                {"average", "DECAY", "of the weights' average with this decay, in place of the weights"},
                {"format", "FORMAT",
                 "of the weights in this format, as bf16, which the run's follow has in its formats"},
                {"versions", "N", "end after so many; 0: never"},
                {"tag", "NAME", "the version of this name (ballastctl tag) alone, and end"},
                {"retain", "N", "whole files of the run that are kept there, the newest, with what follows them; 2"},
                {"changes", "N", "files of changes between one whole file and the next; 0"},
                {"wait-for-run", "SECONDS", "wait so long for a run that its trainers have not begun yet; 0"}},
      .run = FollowRun};
}

}  // namespace ballast::ctl
