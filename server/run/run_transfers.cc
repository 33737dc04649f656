// Weights and state on their way into a run, and out of it, beside its steps.
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "server/run/run.h"

namespace ballast {

void Run::BeginLoad(LoadCall call, bool replaces, absl::AnyInvocable<void(absl::Status)> done) {
  Post([this, call, replaces, done = std::move(done)]() mutable {
    ended_ || closed_ ? done(Gone()) : loader_->Begin(call, replaces, std::move(done));
  });
}

void Run::Load(LoadCall call, std::vector<LoadChunk> chunks, absl::AnyInvocable<void(absl::Status)> done) {
  Post([this, call, chunks = std::move(chunks), done = std::move(done)]() mutable {
    ended_ || closed_ ? done(Gone()) : loader_->Load(call, std::move(chunks), std::move(done));
  });
}

void Run::FinishLoad(LoadCall call, DigestJob::Done done) {
  Post([this, call, done = std::move(done)]() mutable {
    ended_ || closed_ ? done(Gone()) : loader_->Finish(call, std::move(done));
  });
}

void Run::AbandonLoad(LoadCall call) {
  Post([this, call] {
    if (!ended_ && !closed_) loader_->Abandon(call);
  });
}

void Run::Pull(std::shared_ptr<WeightSink> sink, PullOrder order) {
  Post([this, sink = std::move(sink), order = std::move(order)]() mutable {
    if (ended_ || closed_) return sink->Finish(Gone());
    if (auto s = loader_->CheckRead(); !s.ok()) return sink->Finish(s);
    pulls_->Begin(std::move(order), std::move(sink));
  });
}

void Run::OnPullWritten(std::shared_ptr<WeightSink> sink) {
  Post([this, sink = std::move(sink)] {
    if (!ended_) pulls_->OnWritten(sink.get());
  });
}

void Run::OnPullGone(std::shared_ptr<WeightSink> sink) {
  Post([this, sink = std::move(sink)] {
    if (!ended_) pulls_->OnGone(sink.get());
  });
}

void Run::AddFollowers() {
  if (!spec_.follow) return;
  followers_ = std::make_unique<FollowedSeries>(Followers::Environment{
      .spec = &spec_,
      .plan = &plan_,
      .chunk_starts = chunk_starts_,
      .store = store_.get(),
      .strand = &strand_,
      .metrics = metrics_.get(),
      .show = [this](const FollowFigures& figures) { board_.Write([&](RunStatus& s) { s.follow = figures; }); },
      .made = [this] { driver_->OnFollowers(); },
      .tags = spec_.checkpoints ? TagStorage{.fs = storage_.fs,
                                             .threads = storage_.threads,
                                             .rate = storage_.rate,
                                             .run_folder = storage_.folder->path()}
                                : TagStorage()});
  store_->set_before_change([this](uint32_t tensor) { followers_->BeforeChange(tensor); });
}

void Run::EndReaders(const absl::Status& why) {
  pulls_->End(why);
  if (followers_ != nullptr) followers_->Reset(why);
}

absl::Status Run::Unfollowed() const {
  return absl::FailedPreconditionError(
      absl::StrCat("run '", spec_.run_id, "' cannot be followed: its spec has no `follow` (RunSpec.follow); create it ",
                   "with one, or amend it"));
}

void Run::TagVersion(Followers::TagOrder order, TagKeeper::Done done) {
  Post([this, order = std::move(order), done = std::move(done)]() mutable {
    if (ended_ || closed_) return done(Gone());
    if (followers_ == nullptr) return done(Unfollowed());
    if (held_) return done(BeingAmended());  // what takes its place has its names from the disk
    if (auto s = order.version ? absl::OkStatus() : loader_->CheckRead(); !s.ok()) return done(s);
    followers_->weights().Tag(std::move(order), std::move(done));
    driver_->OnFollowers();
  });
}

void Run::UntagVersion(std::string name, absl::AnyInvocable<void(absl::Status)> done) {
  Post([this, name = std::move(name), done = std::move(done)]() mutable {
    if (ended_ || closed_) return done(Gone());
    if (followers_ == nullptr) return done(Unfollowed());
    if (held_) return done(BeingAmended());
    followers_->weights().Untag(name, std::move(done));
  });
}

void Run::ListVersions(WeightSeries series, absl::AnyInvocable<void(absl::StatusOr<Followers::VersionList>)> done) {
  Post([this, series, done = std::move(done)]() mutable {
    if (ended_) return done(Gone());
    if (followers_ == nullptr) return done(Unfollowed());
    Followers::VersionList list = followers_->List(series);
    list.current.generation = driver_->machine().generation();
    list.current.step = driver_->machine().step() - 1;
    done(std::move(list));
  });
}

void Run::Follow(std::shared_ptr<VersionSink> sink, FollowOrder order) {
  Post([this, sink = std::move(sink), order = std::move(order)]() mutable {
    if (ended_ || closed_) return sink->Finish(Gone());
    if (followers_ == nullptr) return sink->Finish(Unfollowed());
    if (auto s = order.version ? absl::OkStatus() : loader_->CheckRead(); !s.ok()) return sink->Finish(s);
    followers_->Begin(std::move(order), std::move(sink));
    driver_->OnFollowers();
  });
}

void Run::OnVersionSent(std::shared_ptr<VersionSink> sink) {
  Post([this, sink = std::move(sink)] {
    if (ended_ || followers_ == nullptr) return;
    followers_->OnSent(sink.get());
    driver_->OnFollowers();  // what was in the way may be gone
  });
}

void Run::OnFollowerGone(std::shared_ptr<VersionSink> sink) {
  Post([this, sink = std::move(sink)] {
    if (ended_ || followers_ == nullptr) return;
    followers_->OnGone(sink.get());
    driver_->OnFollowers();
  });
}

}  // namespace ballast
