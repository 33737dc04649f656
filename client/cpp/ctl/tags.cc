// `ballastctl tag`, `untag` and `versions`: versions of a run's weights that have names.
#include "absl/strings/str_cat.h"

#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/table.h"

namespace ballast::ctl {
namespace {

std::string WhereOf(const v1::TaggedVersion& tag) { return tag.file().empty() ? "memory" : tag.file(); }

int TagRun(const Invocation& invocation) {
  v1::TagVersionRequest request;
  request.set_run_id(invocation.arguments[0]);
  request.set_name(invocation.arguments[1]);
  request.set_replace(invocation.Has("replace"));
  if (invocation.Has("step") && invocation.Has("of")) {
    return Misused(invocation.err, absl::InvalidArgumentError("--step and --of: wanted one of them"), "tag");
  }
  if (invocation.Has("step")) {
    const auto step = WholeNumber("--step", invocation.Get("step", ""));
    if (!step.ok()) return Misused(invocation.err, step.status(), "tag");
    request.mutable_version()->mutable_id()->set_step(*step);
  }
  if (invocation.Has("of")) request.mutable_version()->set_tag(invocation.Get("of", ""));
  const auto client = Connect(invocation);
  if (!client.ok()) return Fail(invocation, client.status());
  const auto tagged = (*client)->TagVersion(request);
  if (!tagged.ok()) return Fail(invocation, tagged.status());
  if (invocation.json) return PrintJson(invocation, *tagged);
  const v1::TaggedVersion& tag = tagged->tag();
  invocation.out << "'" << tag.name() << "' " << (tagged->created() ? "is" : "was already") << " the version of step "
                 << tag.id().step() << " of run '" << request.run_id() << "': " << Bytes(tag.bytes()) << ", in "
                 << WhereOf(tag) << (tag.file().empty() ? "" : " on the daemon's machine") << "\n";
  return kOk;
}

int UntagRun(const Invocation& invocation) {
  const auto client = Connect(invocation);
  if (!client.ok()) return Fail(invocation, client.status());
  const std::string &run = invocation.arguments[0], &name = invocation.arguments[1];
  if (const auto gone = (*client)->UntagVersion(run, name); !gone.ok()) return Fail(invocation, gone);
  if (invocation.json) return PrintJson(invocation, v1::UntagVersionResponse());
  invocation.out << "run '" << run << "' has no version '" << name << "' any more\n";
  return kOk;
}

int PrintVersions(const Invocation& invocation) {
  const auto client = Connect(invocation);
  if (!client.ok()) return Fail(invocation, client.status());
  const auto list = (*client)->ListVersions(invocation.arguments[0]);
  if (!list.ok()) return Fail(invocation, list.status());
  if (invocation.json) return PrintJson(invocation, *list);
  Table table({Table::kLeft, Table::kRight, Table::kRight, Table::kRight, Table::kRight, Table::kLeft});
  table.Row({"NAME", "STEP", "GENERATION", "BYTES", "TAGGED", "WHERE"});
  if (list->has_newest()) {
    table.Row({"(newest)", absl::StrCat(list->newest().step()), absl::StrCat(list->newest().generation()),
               Bytes(list->newest_bytes()), "-", "memory"});
  }
  for (const v1::TaggedVersion& tag : list->tags()) {
    const bool known = tag.id().generation() > 0;
    table.Row({tag.name(), known ? absl::StrCat(tag.id().step()) : "-",
               known ? absl::StrCat(tag.id().generation()) : "-", known ? Bytes(tag.bytes()) : "-",
               known ? absl::StrCat(DurationSince(tag.tagged_unix_s()), " ago") : "-",
               tag.unreadable().empty() ? WhereOf(tag) : absl::StrCat("unreadable: ", tag.unreadable())});
  }
  table.Print(invocation.out);
  invocation.out << list->tags_size() << " of " << list->most_tags() << " names (follow.tags)\n";
  return kOk;
}

}  // namespace

Command TagCommand() {
  return {
      .name = "tag",
      .arguments = {"RUN", "NAME"},
      .summary = "give a version of a run's weights a name, by which it is kept",
      .details =
          "Without --step or --of it is that of the last step that has closed; with one open, of that when it closes.\n"
          "Where the run has checkpoints the version is a safetensors file beside them, else it is in the daemon's\n"
          "memory. The run needs follow.tags in its spec. `ballastctl follow RUN --tag NAME` fetches it.\n",
      .flags = {{"step", "N", "of this step: the newest version's, or that of one that has a name"},
                {"of", "NAME", "of the version that has this name already"},
                {"replace", "", "NAME may be another version's, which then has it no more"}},
      .run = TagRun};
}

Command UntagCommand() {
  return {.name = "untag",
          .arguments = {"RUN", "NAME"},
          .summary = "take a version's name away; with its last one it is gone",
          .details = "",
          .flags = {},
          .run = UntagRun};
}

Command VersionsCommand() {
  return {.name = "versions",
          .arguments = {"RUN"},
          .summary = "the versions of a run's weights that can be read: the newest, and those that have names",
          .details = "The newest is there while somebody follows the run.\n",
          .flags = {},
          .run = PrintVersions};
}

}  // namespace ballast::ctl
