#include "server/follow/followers.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/clock.h"
#include "server/metrics/metric_table.h"

namespace ballast {
namespace {

// More are of no use: a reader that is further behind than this takes a whole version.
constexpr size_t kMostChanges = 256;
// A version that was begun waits so long for a moment in which nothing is sent to ranks.
constexpr double kLateS = 1;

// Not 0, which a reader names that knows of no epochs.
uint64_t Draw() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) | 1;
}

}  // namespace

Followers::Followers(Environment environment)
    : environment_(std::move(environment)),
      needed_bytes_(VersionBytes(*environment_.spec, *environment_.plan) +
                    VersionChangeBytes(*environment_.spec, *environment_.plan)),
      memory_(std::make_shared<FollowMemory>(FollowMemoryBytes(*environment_.spec, *environment_.plan) +
                                             TagMemoryBytes(*environment_.spec, *environment_.plan))),
      epoch_(Draw()),
      tags_(std::make_shared<TagKeeper>(
          TagKeeper::Environment{.spec = environment_.spec,
                                 .chunk_starts = environment_.chunk_starts,
                                 .version_bytes = VersionBytes(*environment_.spec, *environment_.plan),
                                 .memory = memory_,
                                 .strand = environment_.strand,
                                 .storage = environment_.tags,
                                 .changed = [this] { Show(); }})),
      maker_(std::make_shared<VersionMaker>(VersionMaker::Environment{
          .spec = environment_.spec,
          .store = environment_.store,
          .strand = environment_.strand,
          .chunk_starts = environment_.chunk_starts,
          .memory = memory_,
          .made = [this](auto version, auto change) { OnMade(std::move(version), std::move(change)); }})) {
  Show();
}

size_t Followers::reading() const {
  return static_cast<size_t>(
      std::count_if(readers_.begin(), readers_.end(), [](const Reader& r) { return r.job->follows(); }));
}

Followers::Reader* Followers::FindReader(const VersionSink* sink) {
  const auto found =
      std::find_if(readers_.begin(), readers_.end(), [&](const Reader& r) { return r.job->sink() == sink; });
  return found == readers_.end() ? nullptr : &*found;
}

// One that was ended and has not taken that yet counts, too: it has a message.
void Followers::Begin(FollowOrder order, std::shared_ptr<VersionSink> sink) {
  const uint32_t most = environment_.spec->follow->readers;
  if (readers_.size() >= most) {
    return sink->Finish(
        absl::ResourceExhaustedError(absl::StrCat(most, " readers follow run '", environment_.spec->run_id,
                                                  "', as many as its spec allows (follow.readers); ask again later")));
  }
  if (order.version) {
    const VersionChoice choice = *order.version;
    return BeginAlone(choice, std::move(order), std::move(sink));
  }
  if (reading() == 0) awaits_newest_ = true;
  unread_since_s_.reset();
  readers_.push_back(
      {.job = std::make_unique<FollowJob>(environment_.spec, environment_.plan, environment_.chunk_starts,
                                          std::move(order), std::move(sink))});
  OfferAll();
  Show();
}

void Followers::OfferAll() {
  if (awaits_newest_) return;
  for (const Reader& reader : readers_) reader.job->Offer(history_);
}

void Followers::OnSent(const VersionSink* sink) {
  for (Reader& reader : readers_) {
    if (reader.job->sink() != sink) continue;
    constexpr FamilyRef kSent = "ballast_follow_sent_bytes_total";
    reader.job->OnSent();
    const FollowJob::Sent sent = reader.job->TakeSent();
    if (sent.whole > 0) environment_.metrics->Count(kSent, "whole", static_cast<double>(sent.whole));
    if (sent.changes > 0) environment_.metrics->Count(kSent, "changes", static_cast<double>(sent.changes));
    if (!awaits_newest_) reader.job->Offer(history_);
    return;
  }
}

void Followers::OnGone(const VersionSink* sink) {
  const auto found =
      std::find_if(readers_.begin(), readers_.end(), [&](const Reader& r) { return r.job->sink() == sink; });
  if (found == readers_.end()) return;
  found->job->Stop(absl::CancelledError("the reader is gone"));
  readers_.erase(found);
  if (reading() == 0 && !unread_since_s_) unread_since_s_ = MonotonicSeconds();
  if (!awaited()) maker_->Abandon();
  Show();
}

bool Followers::Wants(uint64_t generation, uint64_t step) {
  if (maker_->making() || !awaited()) return false;
  if (history_.newest == nullptr) return HasMemory();
  const VersionId newest = history_.newest->id;
  if (generation == newest.generation && step == newest.step) {
    if (std::exchange(awaits_newest_, false)) OfferAll();
    GiveTags(/*all=*/true);
    return false;
  }
  const uint64_t every = environment_.spec->follow->every;
  const bool is_due = generation != newest.generation || step / every != newest.step / every;
  if (!is_due && !awaits_newest_ && awaited_tags_.empty()) return false;
  return HasMemory();
}

bool Followers::HasMemory() {
  while (memory_->left() < needed_bytes_ && !history_.changes.empty()) history_.changes.pop_front();
  short_of_memory_ = memory_->left() < needed_bytes_;
  return !short_of_memory_;
}

bool Followers::version_is_late() const { return maker_->making() && MonotonicSeconds() > began_s_ + kLateS; }

void Followers::Make(uint64_t generation, uint64_t step, double since_unix_s) {
  began_s_ = MonotonicSeconds();
  for (AwaitedTag& awaited : awaited_tags_) awaited.being_made = true;
  made_for_first_ = awaits_newest_;
  maker_->Begin({.epoch = epoch_, .generation = generation, .step = step}, since_unix_s, history_.newest);
}

void Followers::OnMade(std::shared_ptr<const WeightVersion> version, std::shared_ptr<const VersionChange> change) {
  const double parameters = static_cast<double>(environment_.plan->parameters);
  VersionFigures made{.step = version->id.step, .generation = version->id.generation, .bytes = version->bytes};
  made.make_seconds = MonotonicSeconds() - began_s_;
  if (change != nullptr) made.change_bytes = change->bytes;
  if (change != nullptr) made.changed_ratio = static_cast<double>(change->elements) / parameters;
  history_.newest = std::move(version);
  if (change != nullptr) history_.changes.push_back(std::move(change));
  if (history_.changes.size() > kMostChanges) history_.changes.pop_front();
  if (made_for_first_) awaits_newest_ = false;
  if (reading() == 0) unread_since_s_ = MonotonicSeconds();
  OfferAll();
  GiveTags(/*all=*/false);
  environment_.metrics->OnVersion(made);
  figures_.newest = made;
  Show();
  environment_.made();
}

// A reader that reads on within as much time again finds the status behind what it was sent; after that the call is cut.
void Followers::Tick(double now_s) {
  const double patience_s = environment_.spec->pull_timeout_s;
  double behind_s = 0;
  if (short_of_memory_) EndSlowest(now_s, patience_s);
  EndStuck(now_s, patience_s);
  for (Reader& reader : readers_) {
    const FollowJob& job = *reader.job;
    if (reader.ended_s > 0 && now_s > reader.ended_s + patience_s) job.sink()->Cancel();
    if (job.stopped() && reader.ended_s == 0) reader.ended_s = now_s;
    if (!job.stopped() && job.wanted_since_s()) behind_s = std::max(behind_s, now_s - *job.wanted_since_s());
  }
  // Until then a reader that has lost its connection may go on from where it was.
  if (unread_since_s_ && now_s > *unread_since_s_ + patience_s) history_ = {};
  if (std::exchange(figures_.readers.behind_seconds, behind_s) != behind_s) Show();
}

// One at a time: its version may be all that is in the way.
void Followers::EndSlowest(double now_s, double patience_s) {
  FollowJob* slowest = nullptr;
  for (const Reader& reader : readers_) {
    FollowJob* const job = reader.job.get();
    if (!job->Keeps(history_.newest.get()) || !job->IsSlow(now_s, patience_s)) continue;
    if (slowest == nullptr || job->began_s() < slowest->began_s()) slowest = job;
  }
  if (slowest == nullptr) return;
  environment_.metrics->Count("ballast_followers_ended_total");
  slowest->Stop(absl::UnavailableError(absl::StrCat(
      "this reader of run '", environment_.spec->run_id, "' has taken longer than ", patience_s,
      " s (limits.pull_timeout) and less than 1 MiB a second over a version whose memory the next one needs; subscribe "
      "again, and read faster, or less often (every)")));
}

void Followers::Reset(const absl::Status& why) {
  EndMaking(why);
  for (Reader& reader : readers_) {
    if (reader.job->follows()) reader.job->Stop(why);
  }
  epoch_ = Draw();
  history_ = {};
  figures_ = {};
  Show();
}

void Followers::End(const absl::Status& why) {
  EndMaking(why);
  tags_->End(why);
  for (Reader& reader : readers_) reader.job->Stop(why);
  Show();
}

void Followers::Show() {
  figures_.readers.count = static_cast<uint32_t>(reading());
  figures_.readers.tags = tags_ == nullptr ? 0 : tags_->entries().size();
  figures_.readers.tag_bytes = tags_ == nullptr ? 0 : tags_->bytes();
  environment_.metrics->OnFollowers(figures_.readers);
  environment_.show(figures_);
}

}  // namespace ballast
