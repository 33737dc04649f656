// The writer's half of StepStream: what leaves next, and how many small requests leave together.

#include <utility>

#include "client/cpp/stream/step_stream.h"

namespace ballast {
namespace {

// Of a turn of the writer's, for which it takes the lock twice.
constexpr size_t kMostInTurn = 16;              // requests
constexpr uint64_t kMostBytesInTurn = 8 << 10;  // of a gradient that another one may follow

// How long a small gradient waits for others. Backward in Python makes one in some 50 us; waking the daemon, and its threads
// one another, costs all of them as much.
constexpr absl::Duration kGather = absl::Microseconds(500);

}  // namespace

bool StepStream::MayHalfClose() const { return leaving_ && !step_ && !half_closed_; }

bool StepStream::HasMore() const { return open_ && (MayHalfClose() || (step_ && step_->HasRequest(Allowance()))); }

// The credit with the transport's present number of free slots, which become free before the Credit that says so comes.
CreditWindow StepStream::Allowance() const {
  CreditWindow credit = credit_;
  credit.set_slots_free(call_->transport->slots_free());
  return credit;
}

void StepStream::Write() {
  for (;;) {
    bool late = false;
    {
      absl::MutexLock lock(&mu_);
      const absl::Time watched = opened_by_;
      const auto due = [this, watched]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
        return reader_done_ || WriterHasWork() || opened_by_ != watched;
      };
      late = !mu_.AwaitWithDeadline(absl::Condition(&due), watched);
      if (reader_done_) return;
      if (late) opened_by_ = absl::InfiniteFuture();
      if (!late) Gather();
    }
    if (late) {
      Cancel();
    } else {
      WriteTurn();
    }
  }
}

void StepStream::Gather() {
  const auto enough = [this]()
                          ABSL_NO_THREAD_SAFETY_ANALYSIS { return !WriterHasWork() || !step_ || !step_->MayGather(); };
  mu_.AwaitWithTimeout(absl::Condition(&enough), kGather);
}

void StepStream::WriteTurn() {
  Turn turn;
  {
    absl::MutexLock lock(&mu_);
    if (!WriterHasWork()) return;
    writing_ = true;
    turn = MayHalfClose() ? HalfClose() : TakeTurn();
  }
  Transport& transport = *turn.call->transport;
  bool alive = !turn.requests.empty() || transport.WritesDone();
  for (v1::TrainRequest& request : turn.requests) {
    const bool last = &request == &turn.requests.back();
    alive = alive && (last && turn.room ? WriteThroughRoom(&transport, *turn.room, &request)
                                        : transport.Write(&request, turn.more || !last));
  }
  FreedChunks freed(&memory_);
  absl::MutexLock lock(&mu_);
  EndTurn(alive);
  for (v1::TrainRequest& request : turn.requests) {
    if (turn.step == step_) step_->Sent(&request);
    if (request.has_gradient()) freed.get()->chunks.push_back(std::move(*request.mutable_gradient()->mutable_data()));
  }
}

StepStream::Turn StepStream::HalfClose() {
  half_closed_ = true;
  return {.call = call_};
}

StepStream::Turn StepStream::TakeTurn() {
  Turn turn{.call = call_, .step = step_};
  for (turn.more = true; turn.more && !turn.room && turn.requests.size() < kMostInTurn;) {
    v1::TrainRequest& request = turn.requests.emplace_back();
    credit_ = Allowance();
    step_->NextRequest(&credit_, &request);
    const uint64_t bytes = request.gradient().data().size();
    if (request.has_gradient()) turn.room = call_->transport->Reserve(bytes, /*keep=*/false);
    turn.more = HasMore();
    if (bytes > kMostBytesInTurn) break;
  }
  return turn;
}

void StepStream::EndTurn(bool alive) {
  writing_ = false;
  if (!alive) open_ = false;  // why, the reader finds out
}

void StepStream::Release(Freed* freed) {
  for (const uint32_t slot : freed->slots) {
    if (call_ != nullptr) call_->transport->Release(slot);
  }
  freed->slots.clear();
}

}  // namespace ballast
