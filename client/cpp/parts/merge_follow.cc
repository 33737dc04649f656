#include "client/cpp/parts/merge_follow.h"

#include <algorithm>
#include <vector>

#include "client/cpp/parts/merge.h"

namespace ballast {

v1::FollowStatus MergeFollow(absl::Span<const v1::RunStatus> statuses) {
  v1::FollowStatus whole = statuses[0].follow();
  std::vector<uint64_t> generations;
  double changed = 0, parameters = 0;
  for (const v1::RunStatus& part : statuses) {
    const v1::FollowStatus& follow = part.follow();
    generations.push_back(follow.newest().generation());
    parameters += static_cast<double>(part.parameters());
    changed += follow.changed_ratio() * static_cast<double>(part.parameters());
    if (&part == &statuses[0]) continue;
    if (!follow.has_newest()) whole.clear_newest();
    if (whole.has_newest()) whole.mutable_newest()->set_step(std::min(whole.newest().step(), follow.newest().step()));
    whole.set_readers(std::max(whole.readers(), follow.readers()));
    whole.set_tags(std::max(whole.tags(), follow.tags()));
    whole.set_tag_bytes(whole.tag_bytes() + follow.tag_bytes());
    whole.set_version_bytes(whole.version_bytes() + follow.version_bytes());
    whole.set_change_bytes(whole.change_bytes() + follow.change_bytes());
    whole.set_behind_seconds(std::max(whole.behind_seconds(), follow.behind_seconds()));
  }
  if (parameters > 0) whole.set_changed_ratio(changed / parameters);
  if (!whole.has_newest()) return whole;
  whole.mutable_newest()->set_generation(MergeGenerations(generations));
  whole.mutable_newest()->clear_epoch();
  return whole;
}

}  // namespace ballast
