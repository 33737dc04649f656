// `ballastctl verify`: reads checkpoints on this machine, whole, and asks no daemon.
#include "proto/checkpoint/verify.h"

#include <google/protobuf/struct.pb.h>

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "client/cpp/ctl/command.h"

namespace ballast::ctl {
namespace {

struct Verdict {
  std::string folder;
  absl::Status status;
  std::vector<std::string> said;
};

const char* Word(const absl::Status& status) {
  if (status.ok()) return "good";
  return absl::IsFailedPrecondition(status) ? "cannot be read" : "damaged";
}

Verdict Examine(const std::string& folder) {
  Verdict verdict{.folder = folder};
  verdict.status = VerifyCheckpoint(folder, &verdict.said);
  const std::string why(verdict.status.message());
  const bool told = std::find(verdict.said.begin(), verdict.said.end(), why) != verdict.said.end();
  if (!verdict.status.ok() && !told) verdict.said.push_back(why);
  return verdict;
}

int PrintAsJson(const Invocation& invocation, const std::vector<Verdict>& verdicts) {
  google::protobuf::Struct answer;
  auto* list = (*answer.mutable_fields())["checkpoints"].mutable_list_value();
  for (const Verdict& verdict : verdicts) {
    auto& fields = *list->add_values()->mutable_struct_value()->mutable_fields();
    fields["folder"].set_string_value(verdict.folder);
    fields["good"].set_bool_value(verdict.status.ok());
    auto* said = fields["said"].mutable_list_value();
    for (const std::string& line : verdict.said) said->add_values()->set_string_value(line);
  }
  return PrintJson(invocation, answer);
}

void Print(const Verdict& verdict, std::ostream& out) {
  out << verdict.folder << ": " << Word(verdict.status) << "\n";
  for (const std::string& line : verdict.said) out << "  " << line << "\n";
  out.flush();  // the next one may take minutes
}

int Verify(const Invocation& invocation) {
  const std::string& dir = invocation.arguments[0];
  const auto folders = CheckpointFoldersIn(dir);
  if (!folders.ok()) return Misused(invocation.err, folders.status(), "verify");
  if (folders->empty()) {
    return Misused(
        invocation.err,
        absl::NotFoundError(absl::StrCat("there is no checkpoint in ", dir,
                                         "; wanted: the folder of one, of a run, or a daemon's storage.dir")),
        "verify");
  }
  std::vector<Verdict> verdicts;
  for (const std::string& folder : *folders) {
    verdicts.push_back(Examine(folder));
    if (!invocation.json) Print(verdicts.back(), invocation.out);
  }
  if (invocation.json) {
    if (const int printed = PrintAsJson(invocation, verdicts); printed != kOk) return printed;
  }
  const bool good = std::all_of(verdicts.begin(), verdicts.end(), [](const Verdict& v) { return v.status.ok(); });
  return good ? kOk : kRefused;
}

}  // namespace

Command VerifyCommand() {
  return {
      .name = "verify",
      .arguments = {"DIR"},
      .summary = "check every byte of checkpoints on this machine, without a daemon",
      .details =
          "DIR is the folder of a checkpoint, of a run, or a daemon's storage.dir. What is damaged is named by file\n"
          "and MiB. Exit code 0: all are good, 1: one is not, 64: DIR holds no checkpoint.\n",
      .flags = {},
      .run = Verify};
}

}  // namespace ballast::ctl
