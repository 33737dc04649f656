#include "server/follow/version_readers.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/clock.h"
#include "server/metrics/metric_table.h"

namespace ballast {
namespace {

// More are of no use: a reader that is further behind than this takes a whole version.
constexpr size_t kMostChanges = 256;

}  // namespace

VersionReaders::VersionReaders(Environment environment)
    : environment_(std::move(environment)),
      needed_bytes_(VersionBytes(*environment_.spec, *environment_.plan) +
                    VersionChangeBytes(*environment_.spec, *environment_.plan)),
      memory_(std::make_shared<FollowMemory>(FollowMemoryBytes(*environment_.spec, *environment_.plan) +
                                             environment_.tag_bytes)) {
  Show();
}

size_t VersionReaders::reading() const {
  return static_cast<size_t>(
      std::count_if(readers_.begin(), readers_.end(), [](const Reader& r) { return r.job->follows(); }));
}

bool VersionReaders::AnyWants(VersionId id) const {
  return std::any_of(readers_.begin(), readers_.end(),
                     [&](const Reader& r) { return r.job->follows() && r.job->WantsAfter(id); });
}

// One that was ended and has not taken that yet counts, too: it has a message.
bool VersionReaders::IsFull(VersionSink* sink) const {
  if ((environment_.readers ? environment_.readers() : size()) < environment_.most) return false;
  sink->Finish(
      absl::ResourceExhaustedError(absl::StrCat(environment_.most, " readers follow run '", environment_.spec->run_id,
                                                "', as many as ", environment_.most_key, "; ask again later")));
  return true;
}

FollowJob* VersionReaders::Enter(FollowOrder order, std::shared_ptr<VersionSink> sink) {
  sink->OnTaken();
  readers_.push_back(
      {.job = std::make_unique<FollowJob>(environment_.spec, environment_.plan, environment_.chunk_starts,
                                          std::move(order), std::move(sink))});
  return readers_.back().job.get();
}

void VersionReaders::Begin(FollowOrder order, std::shared_ptr<VersionSink> sink) {
  if (IsFull(sink.get())) return;
  if (environment_.on_demand && reading() == 0) waiting_ = true;
  unread_since_s_.reset();
  Enter(std::move(order), std::move(sink));
  OfferAll();
  Show();
}

FollowJob* VersionReaders::BeginAlone(FollowOrder order, std::shared_ptr<VersionSink> sink) {
  return IsFull(sink.get()) ? nullptr : Enter(std::move(order), std::move(sink));
}

FollowJob* VersionReaders::Find(const VersionSink* sink) const {
  const auto found =
      std::find_if(readers_.begin(), readers_.end(), [&](const Reader& r) { return r.job->sink() == sink; });
  return found == readers_.end() ? nullptr : found->job.get();
}

void VersionReaders::OfferAll() {
  if (waiting_) return;
  for (const Reader& reader : readers_) reader.job->Offer(history_);
}

void VersionReaders::Release() {
  if (std::exchange(waiting_, false)) OfferAll();
}

void VersionReaders::OnSent(const VersionSink* sink) {
  FollowJob* const job = Find(sink);
  if (job == nullptr) return;
  constexpr FamilyRef kSent = "ballast_follow_sent_bytes_total";
  job->OnSent();
  const FollowJob::Sent sent = job->TakeSent();
  if (sent.whole > 0) environment_.metrics->Count(kSent, "whole", static_cast<double>(sent.whole));
  if (sent.changes > 0) environment_.metrics->Count(kSent, "changes", static_cast<double>(sent.changes));
  if (!waiting_) job->Offer(history_);
}

bool VersionReaders::OnGone(const VersionSink* sink) {
  const auto found =
      std::find_if(readers_.begin(), readers_.end(), [&](const Reader& r) { return r.job->sink() == sink; });
  if (found == readers_.end()) return false;
  found->job->Stop(absl::CancelledError("the reader is gone"));
  readers_.erase(found);
  if (reading() == 0 && !unread_since_s_) unread_since_s_ = MonotonicSeconds();
  Show();
  return true;
}

bool VersionReaders::HasMemory() {
  while (memory_->left() < needed_bytes_ && !history_.changes.empty()) history_.changes.pop_front();
  short_of_memory_ = memory_->left() < needed_bytes_;
  return !short_of_memory_;
}

void VersionReaders::Add(std::shared_ptr<const WeightVersion> version, std::shared_ptr<const VersionChange> change,
                         double make_seconds, bool for_waiting) {
  const double parameters = static_cast<double>(environment_.plan->parameters);
  VersionFigures made{.step = version->id.step, .generation = version->id.generation, .bytes = version->bytes};
  made.make_seconds = make_seconds;
  if (change != nullptr) made.change_bytes = change->bytes;
  if (change != nullptr) made.changed_ratio = static_cast<double>(change->elements) / parameters;
  history_.newest = std::move(version);
  if (change != nullptr) history_.changes.push_back(std::move(change));
  if (history_.changes.size() > kMostChanges) history_.changes.pop_front();
  if (for_waiting) waiting_ = false;
  if (reading() == 0) unread_since_s_ = MonotonicSeconds();
  OfferAll();
  if (environment_.shows_versions) environment_.metrics->OnVersion(made);
  figures_.newest = made;
  Show();
}

// A reader that reads on within as much time again finds the status behind what it was sent; after that the call is cut.
void VersionReaders::Tick(double now_s) {
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
  if (environment_.on_demand && unread_since_s_ && now_s > *unread_since_s_ + patience_s) history_ = {};
  if (std::exchange(figures_.readers.behind_seconds, behind_s) != behind_s) Show();
}

// One at a time: its version may be all that is in the way.
void VersionReaders::EndSlowest(double now_s, double patience_s) {
  FollowJob* slowest = nullptr;
  for (const Reader& reader : readers_) {
    FollowJob* const job = reader.job.get();
    if (!job->Keeps(history_.newest.get()) || !job->IsSlow(now_s, patience_s)) continue;
    if (slowest == nullptr || job->began_s() < slowest->began_s()) slowest = job;
  }
  if (slowest == nullptr) return;
  environment_.metrics->Count("ballast_followers_ended_total", "", 1);
  slowest->Stop(absl::UnavailableError(absl::StrCat(
      "this reader of run '", environment_.spec->run_id, "' has taken longer than ", patience_s,
      " s (limits.pull_timeout) and less than 1 MiB a second over a version whose memory the next one needs; subscribe "
      "again, and read faster, or less often (every)")));
}

void VersionReaders::EndStuck(double now_s, double patience_s) {
  for (const Reader& reader : readers_) {
    FollowJob& job = *reader.job;
    if (job.follows() || !job.IsSlow(now_s, patience_s)) continue;
    job.Stop(absl::UnavailableError(absl::StrCat("this reader of a version of run '", environment_.spec->run_id,
                                                 "' has taken nothing for ", patience_s,
                                                 " s (limits.pull_timeout), or less than 1 MiB a second; ask again")));
  }
}

void VersionReaders::EndFollowing(const absl::Status& why) {
  for (Reader& reader : readers_) {
    if (reader.job->follows()) reader.job->Stop(why);
  }
}

void VersionReaders::End(const absl::Status& why) {
  for (Reader& reader : readers_) reader.job->Stop(why);
  Show();
}

void VersionReaders::Forget() {
  history_ = {};
  figures_.newest.reset();
  Show();
}

void VersionReaders::ShowTags(uint64_t count, uint64_t bytes) {
  figures_.readers.tags = count;
  figures_.readers.tag_bytes = bytes;
  Show();
}

void VersionReaders::Show() {
  figures_.readers.count = static_cast<uint32_t>(reading());
  environment_.show(figures_);
}

}  // namespace ballast
