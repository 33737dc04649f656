// Versions that have names, and readers of one version alone.
#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "server/base/clock.h"
#include "server/follow/followers.h"

namespace ballast {
namespace {

// How long a name waits for a step that was asked for, so that nobody waits for one of a run at rest.
constexpr double kTagPatienceS = 30;

// Whether this version is there before the one that the order is for, to which the run comes if nothing takes it back.
bool WaitsOn(const TagKeeper::Order& order, const VersionId& id) {
  return order.only && id.epoch == order.only->epoch && id.generation == order.only->generation &&
         id.step < order.only->step;
}

}  // namespace

absl::Status Followers::GoneError(const VersionChoice& choice) const {
  const WeightVersion* const there = readers_.history().newest.get();
  const std::string newest =
      there == nullptr ? "there is no newest version"
                       : absl::StrCat("the newest is of step ", there->id.step, ", generation ", there->id.generation);
  const std::string asked =
      choice.tag.empty() ? absl::StrCat("of step ", choice.id.step) : absl::StrCat("of the name '", choice.tag, "'");
  return absl::NotFoundError(absl::StrCat("run '", environment_.spec->run_id, "' has no version ", asked, ": ", newest,
                                          "; names: ", tags_->Describe()));
}

void Followers::BeginAlone(FollowOrder order, std::shared_ptr<VersionSink> sink) {
  const VersionChoice choice = *order.version;
  const std::shared_ptr<const WeightVersion> newest = readers_.history().newest;
  const bool is_newest = choice.tag.empty() && newest != nullptr && choice.Is(newest->id);
  const TagKeeper::Entry* const entry = is_newest ? nullptr : tags_->Find(choice);
  if (!is_newest && entry == nullptr) return sink->Finish(GoneError(choice));
  const VersionSink* const key = sink.get();
  FollowJob* const job = readers_.BeginAlone(std::move(order), std::move(sink));
  if (job == nullptr) return;
  if (is_newest) return job->SendAlone(newest);
  if (entry->version != nullptr) return job->SendAlone(entry->version);
  SendStored(key, choice, *entry);
}

void Followers::SendStored(const VersionSink* sink, const VersionChoice& choice, const TagKeeper::Entry& entry) {
  tags_->Open(entry,
              [this, sink, choice, number = entry.number](absl::StatusOr<std::shared_ptr<StoredVersion>> stored) {
                FollowJob* const reader = readers_.Find(sink);
                if (reader == nullptr || reader->stopped()) return;
                if (stored.ok()) return reader->SendAlone(*std::move(stored));
                // The name may have been given to another version, or taken away, before its file was opened.
                const TagKeeper::Entry* const now = tags_->Find(choice);
                if (now == nullptr) return reader->Stop(GoneError(choice));
                if (now->number != number) return SendStored(sink, choice, *now);
                reader->Stop(stored.status());
              });
}

void Followers::TagCurrent(TagKeeper::Order order, TagKeeper::Done done) {
  const std::shared_ptr<const WeightVersion>& newest = readers_.history().newest;
  if (const VersionTag* const given = tags_->Given(order)) return done(TagKeeper::Tagged{.tag = *given});
  if (order.only && newest != nullptr && newest->id == *order.only) {
    return tags_->Add(std::move(order), newest, std::move(done));
  }
  if (auto s = tags_->Check(order, order.only); !s.ok()) return done(s);
  // All ranks may give the same name.
  if (awaited_tags_.size() >= environment_.spec->follow->tags + environment_.spec->ranks) {
    return done(
        absl::ResourceExhaustedError(absl::StrCat(awaited_tags_.size(), " names of run '", environment_.spec->run_id,
                                                  "' wait for a step to close; ask again when it has")));
  }
  awaited_tags_.push_back({.order = std::move(order), .done = std::move(done), .since_s = MonotonicSeconds()});
}

void Followers::ExpireTags(double now_s) {
  const auto is_over = [&](const AwaitedTag& awaited) {
    return awaited.order.only && !awaited.being_made && now_s > awaited.since_s + kTagPatienceS;
  };
  const auto first = std::stable_partition(awaited_tags_.begin(), awaited_tags_.end(),
                                           [&](const AwaitedTag& awaited) { return !is_over(awaited); });
  std::vector<AwaitedTag> over(std::make_move_iterator(first), std::make_move_iterator(awaited_tags_.end()));
  awaited_tags_.erase(first, awaited_tags_.end());
  for (AwaitedTag& awaited : over) {
    awaited.done(
        absl::AbortedError(absl::StrCat("step ", awaited.order.only->step, " of run '", environment_.spec->run_id,
                                        "' has not closed within ", kTagPatienceS, " s")));
  }
}

void Followers::Tag(TagOrder order, TagKeeper::Done done) {
  if (!order.version) return TagCurrent(std::move(order.order), std::move(done));
  const VersionChoice& choice = *order.version;
  if (choice.tag.empty() && readers_.history().newest != nullptr && choice.Is(readers_.history().newest->id)) {
    return tags_->Add(std::move(order.order), readers_.history().newest, std::move(done));
  }
  const TagKeeper::Entry* const entry = tags_->Find(choice);
  if (entry == nullptr) return done(GoneError(choice));
  tags_->AddAgain(std::move(order.order), *entry, std::move(done));
}

bool Followers::IsNamed(const VersionId& id) const {
  return std::any_of(awaited_tags_.begin(), awaited_tags_.end(),
                     [&](const AwaitedTag& awaited) { return !WaitsOn(awaited.order, id); });
}

void Followers::GiveTags(bool all) {
  std::vector<AwaitedTag> given;
  std::vector<AwaitedTag> left;
  const VersionId& id = readers_.history().newest->id;
  for (AwaitedTag& awaited : awaited_tags_) {
    const bool is_its = awaited.order.only == id;
    const bool waits_on = WaitsOn(awaited.order, id);
    (is_its || (!waits_on && (all || awaited.being_made)) ? given : left).push_back(std::move(awaited));
  }
  awaited_tags_ = std::move(left);
  for (AwaitedTag& tag : given) tags_->Add(std::move(tag.order), readers_.history().newest, std::move(tag.done));
}

void Followers::EndMaking(const absl::Status& why) {
  maker_->Abandon();
  for (AwaitedTag& awaited : std::exchange(awaited_tags_, {})) awaited.done(why);
}

Followers::VersionList Followers::List() const {
  VersionList list{.newest = newest(), .most_tags = environment_.spec->follow->tags, .current = {.epoch = epoch_}};
  for (const auto& [name, entry] : tags_->entries()) list.tags.push_back(entry.tag);
  return list;
}

}  // namespace ballast
