#include "server/follow/followers.h"

#include <random>
#include <utility>

#include "server/base/clock.h"

namespace ballast {
namespace {

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
      readers_({.spec = environment_.spec,
                .plan = environment_.plan,
                .chunk_starts = environment_.chunk_starts,
                .most = environment_.spec->follow->readers,
                .most_key = "its spec allows (follow.readers)",
                .on_demand = true,
                .tag_bytes = names_versions() ? TagMemoryBytes(*environment_.spec, *environment_.plan) : 0,
                .readers = environment_.readers,
                .metrics = environment_.metrics,
                .shows_versions = names_versions(),
                .show = environment_.show}),
      epoch_(Draw()),
      tags_(std::make_shared<TagKeeper>(
          TagKeeper::Environment{.spec = environment_.spec,
                                 .chunk_starts = environment_.chunk_starts,
                                 .version_bytes = VersionBytes(*environment_.spec, *environment_.plan),
                                 .memory = readers_.memory(),
                                 .strand = environment_.strand,
                                 .storage = names_versions() ? environment_.tags : TagStorage{},
                                 .changed = [this] { readers_.ShowTags(tags_->entries().size(), tags_->bytes()); }})),
      maker_(std::make_shared<VersionMaker>(VersionMaker::Environment{
          .spec = environment_.spec,
          .store = environment_.store,
          .strand = environment_.strand,
          .chunk_starts = environment_.chunk_starts,
          .memory = readers_.memory(),
          .series = environment_.series,
          .made = [this](auto version, auto change) { OnMade(std::move(version), std::move(change)); }})) {}

void Followers::Begin(FollowOrder order, std::shared_ptr<VersionSink> sink) {
  if (order.version) return BeginAlone(std::move(order), std::move(sink));
  readers_.Begin(std::move(order), std::move(sink));
}

void Followers::OnGone(const VersionSink* sink) {
  if (readers_.OnGone(sink) && !awaited()) maker_->Abandon();
}

bool Followers::Wants(uint64_t generation, uint64_t step) {
  if (maker_->making() || !awaited()) return false;
  const VersionId id{.epoch = epoch_, .generation = generation, .step = step};
  const bool named = IsNamed(id);
  if (readers_.history().newest == nullptr) return (named || readers_.reading() > 0) && readers_.HasMemory();
  const VersionId newest = readers_.history().newest->id;
  if (generation == newest.generation && step == newest.step) {
    readers_.Release();
    GiveTags(/*all=*/true);
    return false;
  }
  if (named) return readers_.HasMemory();
  if (readers_.reading() == 0 || (environment_.spec->part && !readers_.AnyWants(id))) return false;
  const uint64_t every = environment_.spec->follow->every;
  const bool is_due = generation != newest.generation || step / every != newest.step / every;
  return (is_due || readers_.waiting()) && readers_.HasMemory();
}

bool Followers::version_is_late() const { return maker_->making() && MonotonicSeconds() > began_s_ + kLateS; }

void Followers::Make(uint64_t generation, uint64_t step, double since_unix_s) {
  began_s_ = MonotonicSeconds();
  for (AwaitedTag& awaited : awaited_tags_) awaited.being_made = true;
  made_for_waiting_ = readers_.waiting();
  maker_->Begin({.epoch = epoch_, .generation = generation, .step = step}, since_unix_s, readers_.history().newest);
}

void Followers::OnMade(std::shared_ptr<const WeightVersion> version, std::shared_ptr<const VersionChange> change) {
  readers_.Add(std::move(version), std::move(change), MonotonicSeconds() - began_s_, made_for_waiting_);
  GiveTags(/*all=*/false);
  environment_.made();
}

void Followers::Reset(const absl::Status& why) {
  EndMaking(why);
  readers_.EndFollowing(why);
  epoch_ = Draw();
  readers_.Forget();
}

void Followers::End(const absl::Status& why) {
  EndMaking(why);
  tags_->End(why);
  readers_.End(why);
}

}  // namespace ballast
