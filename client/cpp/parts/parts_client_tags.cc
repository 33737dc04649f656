// Versions of a run on several daemons that have names.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "client/cpp/parts/for_all.h"
#include "client/cpp/parts/part_tags.h"
#include "client/cpp/parts/parts_client.h"

namespace ballast {
namespace {

// Beside a run that goes on a step is over on one daemon before another is asked to keep it: then a later one, which all wait for.
constexpr uint64_t kAhead[] = {0, 2, 8, 32};

bool Has(const v1::ListVersionsResponse& list, const std::string& name) {
  return std::any_of(list.tags().begin(), list.tags().end(), [&](const auto& tag) { return tag.name() == name; });
}

}  // namespace

absl::StatusOr<std::vector<v1::ListVersionsResponse>> PartsClient::VersionsOfParts(const std::string& run_id) const {
  return AllOrError(ForAll(parts(), [&](uint32_t part) { return daemons_[part]->ListVersions(run_id); }), names_);
}

absl::StatusOr<v1::TagVersionResponse> PartsClient::TagVersion(const v1::TagVersionRequest& request) {
  const auto before = VersionsOfParts(request.run_id());
  if (!before.ok()) return before.status();
  absl::StatusOr<v1::TagVersionResponse> answer = absl::UnknownError("");
  std::vector<bool> given(parts());
  for (const uint64_t ahead : kAhead) {
    answer = TagOnce(request, ahead, &given);
    if (answer.ok() || !absl::IsAborted(answer.status())) break;
  }
  if (answer.ok()) return answer;
  std::string left;
  for (uint32_t part = 0; part < parts(); ++part) {
    if (!given[part]) continue;
    const bool replaced = Has((*before)[part], request.name());
    if (replaced || !daemons_[part]->UntagVersion(request.run_id(), request.name()).ok()) left = names_[part];
  }
  if (left.empty()) return answer;
  return absl::Status(
      answer.status().code(),
      absl::StrCat(std::string(answer.status().message()), "; ", left, " has the new version by the name '",
                   request.name(), "' already, which cannot be read until all have: name it again"));
}

absl::StatusOr<v1::TagVersionResponse> PartsClient::TagOnce(const v1::TagVersionRequest& request, uint64_t ahead,
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
  return MergeTagged(*all);
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
