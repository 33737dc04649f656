#include "server/relay/relayed_run.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

#include "server/base/clock.h"

namespace ballast {

RelayedRun::RelayedRun(Options options)
    : spec_(std::move(options.spec)),
      plan_(std::move(options.plan)),
      chunk_starts_(std::make_shared<const std::vector<uint64_t>>(ChunkStarts(spec_))),
      readers_(std::make_unique<VersionReaders>(
          VersionReaders::Environment{.spec = &spec_,
                                      .plan = &plan_,
                                      .chunk_starts = chunk_starts_,
                                      .most = options.readers,
                                      .most_key = "this relay takes (relay.readers)",
                                      .metrics = options.metrics,
                                      .show =
                                          [this, metrics = options.metrics](const FollowFigures& figures) {
                                            metrics->OnFollowers(figures.readers);
                                            absl::MutexLock lock(&mu_);
                                            figures_ = figures;
                                          }})),
      strand_({.name = absl::StrCat("relay:", spec_.run_id).substr(0, 15), .tick = [this] { Tick(); }}) {}

RelayedRun::~RelayedRun() {
  if (readers_ != nullptr) End(absl::UnavailableError("the relay is shutting down"));
}

void RelayedRun::Tick() {
  if (ended_.ok()) readers_->Tick(MonotonicSeconds());
}

FollowFigures RelayedRun::figures() const {
  absl::MutexLock lock(&mu_);
  return figures_;
}

void RelayedRun::Follow(std::shared_ptr<VersionSink> sink, FollowOrder order) {
  strand_.Post([this, sink = std::move(sink), order = std::move(order)]() mutable {
    if (!ended_.ok()) return sink->Finish(ended_);
    if (readers_->history().newest == nullptr && !none_.ok()) return sink->Finish(none_);
    readers_->Begin(std::move(order), std::move(sink));
  });
}

void RelayedRun::OnVersionSent(std::shared_ptr<VersionSink> sink) {
  strand_.Post([this, sink = std::move(sink)] {
    if (ended_.ok()) readers_->OnSent(sink.get());
  });
}

void RelayedRun::OnFollowerGone(std::shared_ptr<VersionSink> sink) {
  strand_.Post([this, sink = std::move(sink)] {
    if (ended_.ok()) readers_->OnGone(sink.get());
  });
}

bool RelayedRun::HasRoom() {
  bool has = false;
  absl::Notification done;
  strand_.Post([&] {
    has = readers_->HasMemory();
    done.Notify();
  });
  done.WaitForNotification();
  return has;
}

void RelayedRun::Publish(std::shared_ptr<const WeightVersion> version, std::shared_ptr<const VersionChange> change,
                         double seconds) {
  strand_.Post([this, version = std::move(version), change = std::move(change), seconds]() mutable {
    none_ = absl::OkStatus();
    readers_->Add(std::move(version), std::move(change), seconds);
  });
}

void RelayedRun::SayWhyNone(absl::Status why) {
  strand_.Post([this, why = std::move(why)]() mutable { none_ = std::move(why); });
}

void RelayedRun::End(const absl::Status& status) {
  strand_.Post([this, status] {
    ended_ = status;
    readers_->End(status);
    readers_->Forget();
  });
  strand_.Stop();
  readers_.reset();  // which holds the readers' streams, and these hold the run
}

}  // namespace ballast
