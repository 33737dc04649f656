// Versions of a run on several daemons that have names.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "client/cpp/parts/for_all.h"
#include "client/cpp/parts/part_tags.h"
#include "client/cpp/parts/parts_client.h"

namespace ballast {
namespace {

constexpr int kTries = 4;
// Beside a run that goes on a step is over on one daemon before another is asked to keep it: then a later one, which all wait for.
constexpr uint64_t kAhead[kTries] = {0, 2, 8, 32};

absl::Status WithHint(const absl::Status& status, const std::string& hint) {
  return absl::Status(status.code(), absl::StrCat(std::string(status.message()), hint));
}

}  // namespace

absl::StatusOr<std::vector<v1::ListVersionsResponse>> PartsClient::VersionsOfParts(const std::string& run_id) const {
  return AllOrError(ForAll(parts(), [&](uint32_t part) { return daemons_[part]->ListVersions(run_id); }), names_);
}

absl::StatusOr<v1::TagVersionResponse> PartsClient::TagVersion(const v1::TagVersionRequest& request) {
  const bool is_rank = attached_ && request.run_id() == whole_.run_id;
  if (!is_rank && !request.has_version()) return TagBeside(request);
  absl::StatusOr<v1::TagVersionResponse> answer = absl::UnknownError("");
  std::vector<bool> given(parts());
  // No step closes while a rank is in here. A daemon may be started again, or taken back, between the two calls.
  for (int i = 0; i < kTries && (i == 0 || absl::IsAborted(answer.status())); ++i) answer = TagAll(request, 0, &given);
  if (answer.ok()) return answer;
  std::vector<std::string> left;
  for (uint32_t part = 0; part < parts(); ++part) {
    if (given[part]) left.push_back(names_[part]);
  }
  if (left.empty()) return answer;
  return WithHint(answer.status(),
                  absl::StrCat("; at ", absl::StrJoin(left, " and "), " the version has the name '", request.name(),
                               "' already: it cannot be read until all give it, so ask again"));
}

// The name is given once all keep the version by another, which is nobody's: what has the name is lost at no time before.
absl::StatusOr<v1::TagVersionResponse> PartsClient::TagBeside(const v1::TagVersionRequest& request) {
  v1::TagVersionRequest kept;
  kept.set_run_id(request.run_id());
  kept.set_name(absl::StrCat("naming-", absl::Hex(absl::Uniform<uint64_t>(absl::BitGen()), absl::kZeroPad16)));
  absl::StatusOr<v1::TagVersionResponse> answer = absl::UnknownError("");
  std::vector<bool> given(parts());
  for (int i = 0; i < kTries && (i == 0 || absl::IsAborted(answer.status())); ++i) {
    answer = TagAll(kept, kAhead[i], &given);
  }
  if (answer.ok()) {
    v1::TagVersionRequest named = request;
    named.mutable_version()->set_tag(kept.name());
    answer = TagVersion(named);
  } else if (absl::IsResourceExhausted(answer.status())) {
    answer = WithHint(answer.status(),
                      "; for a moment it takes one name more, but where a trainer gives it (optimizer.tag)");
  }
  // After an error some daemon may have it, and not have said so.
  const absl::Status untagged = UntagVersion(request.run_id(), kept.name());
  if (!untagged.ok() && !absl::IsNotFound(untagged)) {
    Log(absl::StrCat("the name '", kept.name(), "' of run '", request.run_id(),
                     "' is left: ", std::string(untagged.message())));
  }
  return answer;
}

absl::StatusOr<v1::TagVersionResponse> PartsClient::TagAll(const v1::TagVersionRequest& request, uint64_t ahead,
                                                           std::vector<bool>* given) {
  const auto lists = VersionsOfParts(request.run_id());
  if (!lists.ok()) return lists.status();
  auto orders = OrdersOfTag(*lists, names_, request, ahead);
  if (!orders.ok()) return orders.status();
  const auto answers = ForAll(parts(), [&](uint32_t part) {
    if ((*given)[part]) (*orders)[part].set_replace(true);  // what an earlier try has left
    return daemons_[part]->TagVersion((*orders)[part]);
  });
  for (uint32_t part = 0; part < parts(); ++part) {
    (*given)[part] = (*given)[part] || (answers[part].ok() && answers[part]->created());
  }
  const auto all = AllOrError(answers, names_);
  if (!all.ok()) return all.status();
  if (request.has_version()) return MergeTagged(*all);
  const auto now = VersionsOfParts(request.run_id());
  if (now.ok() && AreOfNow(*now, *orders)) return MergeTagged(*all);
  if (auto s = UntagVersion(request.run_id(), request.name()); !s.ok()) return s;
  std::fill(given->begin(), given->end(), false);
  if (!now.ok()) return now.status();
  return absl::AbortedError(
      absl::StrCat("run '", request.run_id(), "' was taken back while its version was named; ask again"));
}

absl::Status PartsClient::UntagVersion(const std::string& run_id, const std::string& name) {
  const auto untagged = ForAll(parts(), [&](uint32_t part) { return daemons_[part]->UntagVersion(run_id, name); });
  bool any = false;
  absl::Status none;
  for (uint32_t part = 0; part < parts(); ++part) {
    any = any || untagged[part].ok();
    if (untagged[part].ok()) continue;
    if (!absl::IsNotFound(untagged[part])) return NamedBy(names_[part], untagged[part]);
    none = untagged[part];
  }
  return any ? absl::OkStatus() : none;
}

absl::StatusOr<v1::ListVersionsResponse> PartsClient::ListVersions(const std::string& run_id) {
  const auto lists = VersionsOfParts(run_id);
  if (!lists.ok()) return lists.status();
  return MergeVersions(*lists, names_);
}

}  // namespace ballast
