#include "client/cpp/parts/part_tags.h"

#include <algorithm>
#include <map>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/checksum.h"

#include "client/cpp/parts/merge.h"

namespace ballast {
namespace {

using Ids = std::vector<v1::VersionId>;
// Of one name by part; nullptr: that daemon does not have it.
using Tags = std::vector<const v1::TaggedVersion*>;

std::map<std::string, Tags> TagsByName(VersionLists lists) {
  std::map<std::string, Tags> tags;
  for (size_t part = 0; part < lists.size(); ++part) {
    for (const v1::TaggedVersion& tag : lists[part].tags()) {
      Tags& of_name = tags[tag.name()];
      of_name.resize(lists.size());
      of_name[part] = &tag;
    }
  }
  return tags;
}

v1::VersionId MergeIds(const Ids& ids) {
  v1::VersionId merged;
  std::vector<uint64_t> generations;
  merged.set_step(ids[0].step());
  for (const v1::VersionId& id : ids) {
    merged.set_step(std::min(merged.step(), id.step()));
    generations.push_back(id.generation());
  }
  merged.set_generation(MergeGenerations(generations));
  return merged;
}

// Why the parts' versions of one name are none of the run; empty: they are one.
std::string WhyUnreadable(const Tags& tags, absl::Span<const std::string> names) {
  for (size_t part = 0; part < tags.size(); ++part) {
    if (tags[part] != nullptr && !tags[part]->unreadable().empty()) {
      return absl::StrCat(names[part], ": ", tags[part]->unreadable());
    }
  }
  for (size_t part = 0; part < tags.size(); ++part) {
    const bool here = tags[part] != nullptr && tags[part]->mark() != 0;
    if (!here || tags[0] == nullptr || tags[part]->mark() != tags[0]->mark()) {
      return absl::StrCat("the run's daemons do not have one version of this name, ", names[part],
                          here ? " another" : " none",
                          ": it is being named, or was named or taken away by halves; then name one again with "
                          "replace, or untag it");
    }
  }
  return "";
}

v1::TaggedVersion MergeTags(const Tags& tags) {
  v1::TaggedVersion merged;
  Ids ids;
  std::vector<std::string> files;
  for (const v1::TaggedVersion* tag : tags) {
    if (tag == nullptr) continue;
    ids.push_back(tag->id());
    merged.set_name(tag->name());
    merged.set_mark(tag->mark());
    merged.set_bytes(merged.bytes() + tag->bytes());
    merged.set_closed_unix_s(std::max(merged.closed_unix_s(), tag->closed_unix_s()));
    merged.set_tagged_unix_s(std::max(merged.tagged_unix_s(), tag->tagged_unix_s()));
    if (!tag->file().empty()) files.push_back(tag->file());
  }
  *merged.mutable_id() = MergeIds(ids);
  merged.set_file(absl::StrJoin(files, ", "));
  return merged;
}

// That of the versions of these ids, and of no others.
uint64_t MarkOf(const Ids& ids) {
  std::vector<uint64_t> numbers;
  for (const v1::VersionId& id : ids) numbers.insert(numbers.end(), {id.epoch(), id.generation(), id.step()});
  const auto* const bytes = reinterpret_cast<const std::byte*>(numbers.data());
  return std::max<uint64_t>(1, WeightDigest({bytes, numbers.size() * sizeof(uint64_t)}));
}

absl::StatusOr<Ids> IdsToName(VersionLists lists, absl::Span<const std::string> names,
                              const v1::TagVersionRequest& request, uint64_t ahead) {
  if (request.has_version() && request.version().has_tag()) return FindTag(lists, names, request.version().tag());
  if (request.has_version()) {
    return absl::UnimplementedError(
        "a version of a run on several daemons has an id on each of them: choose it by a name that it has, or leave "
        "`version` out, which is that of the last step");
  }
  Ids ids;
  uint64_t step = 0;
  for (size_t part = 0; part < lists.size(); ++part) {
    const v1::ListVersionsResponse& list = lists[part];
    if (!list.has_current()) {
      return absl::UnimplementedError(absl::StrCat(
          "the daemon at ", names[part], " is older than this client, and names no versions of a part: update it"));
    }
    ids.push_back(list.current());
    step = std::max(step, list.current().step());
  }
  for (v1::VersionId& id : ids) id.set_step(step + ahead);
  return ids;
}

}  // namespace

v1::ListVersionsResponse MergeVersions(VersionLists lists, absl::Span<const std::string> names) {
  v1::ListVersionsResponse merged;
  Ids newest, current;
  merged.set_most_tags(lists[0].most_tags());
  for (const v1::ListVersionsResponse& list : lists) {
    merged.set_most_tags(std::min(merged.most_tags(), list.most_tags()));
    current.push_back(list.current());
    if (list.has_newest()) newest.push_back(list.newest());
    merged.set_newest_bytes(merged.newest_bytes() + list.newest_bytes());
    merged.set_newest_closed_unix_s(std::max(merged.newest_closed_unix_s(), list.newest_closed_unix_s()));
  }
  *merged.mutable_current() = MergeIds(current);
  if (newest.size() == lists.size()) {
    *merged.mutable_newest() = MergeIds(newest);
  } else {
    merged.clear_newest_bytes();
    merged.clear_newest_closed_unix_s();
  }
  for (const auto& [name, tags] : TagsByName(lists)) {
    v1::TaggedVersion* const tag = merged.add_tags();
    *tag = MergeTags(tags);
    tag->set_unreadable(WhyUnreadable(tags, names));
  }
  return merged;
}

absl::StatusOr<std::vector<v1::VersionId>> FindTag(VersionLists lists, absl::Span<const std::string> names,
                                                   const std::string& tag) {
  const std::map<std::string, Tags> all = TagsByName(lists);
  const auto found = all.find(tag);
  if (found == all.end()) {
    const auto quoted = [](std::string* out, const auto& one) { absl::StrAppend(out, "'", one.first, "'"); };
    return absl::NotFoundError(absl::StrCat("there is no version of the name '", tag,
                                            "'; names: ", all.empty() ? "none" : absl::StrJoin(all, ", ", quoted)));
  }
  if (const std::string why = WhyUnreadable(found->second, names); !why.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("version '", tag, "': ", why));
  }
  Ids ids;
  for (const v1::TaggedVersion* one : found->second) ids.push_back(one->id());
  return ids;
}

bool AreOfNow(VersionLists lists, absl::Span<const v1::TagVersionRequest> orders) {
  for (size_t part = 0; part < lists.size(); ++part) {
    const v1::VersionId &now = lists[part].current(), &only = orders[part].only();
    if (now.generation() != only.generation() || now.epoch() != only.epoch()) return false;
  }
  return true;
}

absl::StatusOr<std::vector<v1::TagVersionRequest>> OrdersOfTag(VersionLists lists, absl::Span<const std::string> names,
                                                               const v1::TagVersionRequest& request, uint64_t ahead) {
  const auto ids = IdsToName(lists, names, request, ahead);
  if (!ids.ok()) return ids.status();
  std::vector<v1::TagVersionRequest> orders(lists.size(), request);
  for (size_t part = 0; part < orders.size(); ++part) {
    orders[part].set_mark(MarkOf(*ids));
    *orders[part].mutable_only() = (*ids)[part];
  }
  return orders;
}

v1::TagVersionResponse MergeTagged(absl::Span<const v1::TagVersionResponse> answers) {
  v1::TagVersionResponse merged;
  Tags tags;
  for (const v1::TagVersionResponse& answer : answers) {
    tags.push_back(&answer.tag());
    merged.set_created(merged.created() || answer.created());
  }
  *merged.mutable_tag() = MergeTags(tags);
  return merged;
}

}  // namespace ballast
