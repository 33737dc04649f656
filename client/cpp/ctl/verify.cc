// `ballastctl verify`: reads checkpoints on this machine, whole, and asks no daemon.
#include "proto/checkpoint/verify.h"

#include <google/protobuf/struct.pb.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"

#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/table.h"

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

// The daemon retires and sets aside checkpoints while they are read here.
bool IsGone(const std::string& folder) {
  std::error_code error;
  return !std::filesystem::exists(std::filesystem::symlink_status(folder, error));
}

struct Findings {
  std::vector<Verdict> verdicts;
  std::vector<std::string> notes;
};

int PrintAsJson(const Invocation& invocation, const Findings& findings) {
  google::protobuf::Struct answer;
  auto* list = (*answer.mutable_fields())["checkpoints"].mutable_list_value();
  for (const Verdict& verdict : findings.verdicts) {
    auto& fields = *list->add_values()->mutable_struct_value()->mutable_fields();
    fields["folder"].set_string_value(verdict.folder);
    fields["good"].set_bool_value(verdict.status.ok());
    auto* said = fields["said"].mutable_list_value();
    for (const std::string& line : verdict.said) said->add_values()->set_string_value(line);
  }
  auto* notes = (*answer.mutable_fields())["notes"].mutable_list_value();
  for (const std::string& note : findings.notes) notes->add_values()->set_string_value(note);
  return PrintJson(invocation, answer);
}

void Print(const Verdict& verdict, std::ostream& out) {
  out << verdict.folder << ": " << Word(verdict.status) << "\n";
  for (const std::string& line : verdict.said) out << "  " << Visible(line) << "\n";
  out.flush();  // the next one may take minutes
}

Findings ExamineAll(const Invocation& invocation, const std::vector<std::string>& folders) {
  Findings findings;
  for (const std::string& folder : folders) {
    Verdict verdict = Examine(folder);
    if (!verdict.status.ok() && IsGone(folder)) {
      findings.notes.push_back(absl::StrCat(folder, " is gone: the daemon has removed it, or given it another name"));
      continue;
    }
    if (!invocation.json) Print(verdict, invocation.out);
    findings.verdicts.push_back(std::move(verdict));
  }
  return findings;
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
  const Findings findings = ExamineAll(invocation, *folders);
  if (invocation.json) {
    if (const int printed = PrintAsJson(invocation, findings); printed != kOk) return printed;
  } else {
    for (const std::string& note : findings.notes) invocation.out << note << "\n";
  }
  const auto& verdicts = findings.verdicts;
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
          "and MiB. One that a daemon retires meanwhile is named, and no damage.\n"
          "Exit code 0: all are good, 1: one is not, 64: DIR holds no checkpoint.\n",
      .flags = {},
      .run = Verify};
}

}  // namespace ballast::ctl
