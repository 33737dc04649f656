// The writer's half of StepStream: what leaves next, and how many small requests leave together.

#include <algorithm>
#include <utility>

#include "proto/batch.h"

#include "client/cpp/stream/step_stream.h"

namespace ballast {
namespace {

// Of a turn of the writer's, for which it takes the lock twice.
constexpr size_t kMostInTurn = 64;              // requests
constexpr uint64_t kMostBytesInTurn = 8 << 10;  // of a gradient that another one may follow

// How long a small gradient waits for others. Backward in Python makes one in some 50 us; waking the daemon, and its threads
// one another, costs all of them as much.
constexpr absl::Duration kGather = absl::Microseconds(500);

// Whether the request may go as one of SmallGradients.
bool Joins(const v1::TrainRequest& request) {
  return request.has_gradient() && request.gradient().chunk() == 0 &&
         request.gradient().data().size() <= kMostBytesInTurn;
}

// The first of these requests, as many as may go as one: those are of one micro-batch, since what begins another is between.
size_t CountJoined(absl::Span<v1::TrainRequest> requests) {
  size_t count = 0;
  for (uint64_t bytes = 0; count < requests.size() && Joins(requests[count]); ++count) {
    bytes += requests[count].gradient().data().size();
    if (bytes > kMostJoinedBytes) break;
  }
  return count;
}

// As one; fills in the checksums that they lack.
v1::TrainRequest Join(absl::Span<v1::TrainRequest> requests) {
  v1::TrainRequest joined;
  v1::SmallGradients& small = *joined.mutable_small_gradients();
  small.set_micro(requests.front().gradient().micro());
  small.mutable_data()->reserve(kMostJoinedBytes);
  for (v1::TrainRequest& request : requests) {
    v1::Gradient& gradient = *request.mutable_gradient();
    FillChecksum(&gradient);
    small.add_tensors(gradient.tensor());
    small.add_sizes(static_cast<uint32_t>(gradient.data().size()));
    small.add_crc32c(gradient.crc32c());
    small.mutable_data()->append(gradient.data());
  }
  return joined;
}

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
  const absl::StatusOr<bool> alive = Write(&turn);
  if (!alive.ok()) return GiveTurnUp(alive.status());
  FreedChunks freed(&memory_);
  absl::MutexLock lock(&mu_);
  EndTurn(*alive);
  for (v1::TrainRequest& request : turn.requests) {
    if (turn.step == step_) step_->Sent(&request);
    if (request.has_gradient()) freed.get()->chunks.push_back(std::move(*request.mutable_gradient()->mutable_data()));
  }
}

absl::StatusOr<bool> StepStream::Write(Turn* turn) {
  Transport& transport = *turn->call->transport;
  if (turn->requests.empty()) return transport.WritesDone();
  for (absl::Span<v1::TrainRequest> left = absl::MakeSpan(turn->requests); !left.empty();) {
    const size_t joined = turn->joins ? CountJoined(left) : 0, count = std::max<size_t>(joined, 1);
    const bool last = count == left.size(), more = turn->more || !last;
    if (joined > 1) {
      v1::TrainRequest several = Join(left.first(joined));
      if (!transport.Write(&several, more)) return false;
    } else if (last && turn->room) {
      return WriteThroughRoom(&transport, *turn->room, &left.front());
    } else if (!transport.Write(&left.front(), more)) {
      return false;
    }
    left.remove_prefix(count);
  }
  return true;
}

StepStream::Turn StepStream::HalfClose() {
  half_closed_ = true;
  return {.call = call_};
}

StepStream::Turn StepStream::TakeTurn() {
  Turn turn{.call = call_, .step = step_, .joins = takes_small_gradients_};
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
