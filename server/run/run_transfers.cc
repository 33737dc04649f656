// Weights and state on their way into a run, and out of it, beside its steps.
#include <utility>
#include <vector>

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

}  // namespace ballast
