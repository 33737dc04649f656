// How StepStream takes a gradient in: chunks that may leave at once are copied to where the daemon reads them; of the others
// it makes a copy, in portions that leave while the next is made, as long as there may be more.

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "client/cpp/stream/step_stream.h"

namespace ballast {
namespace {

// Chunks of a gradient that are copied between two looks at the step.
constexpr uint64_t kCutTogether = 4;

// Of a chunk. Smaller ones gather, and leave together.
constexpr uint64_t kLeastSentNow = 16 << 10;

// How long Push waits for a request that is being written before it rather copies: about as long as that takes.
constexpr absl::Duration kTurn = absl::Milliseconds(1);

}  // namespace

absl::Status StepStream::Push(uint32_t tensor, absl::Span<const std::byte> gradient) {
  if (auto s = tensors_.CheckIndex(tensor); !s.ok()) return s;
  const WireTensor& wire = tensors_[tensor];
  if (!wire.shard.contributes) {
    return absl::InvalidArgumentError(absl::StrCat("Push of ", tensors_.Name(tensor), ": rank ", options_.rank,
                                                   " holds elements [", wire.shard.begin, ", ", wire.shard.end,
                                                   ") of it and contributes nothing, as AttachOptions.shards ",
                                                   "says; it counts as absent here: leave the call out"));
  }
  if (gradient.size() != wire.gradient_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("gradient of ", tensors_.Name(tensor), ": got ", gradient.size(),
                                                   " bytes, wanted ", wire.gradient_bytes(), " (", wire.held_elements(),
                                                   " x ", wire.gradient, ")"));
  }
  const bool small = gradient.size() < kLeastSentNow && wire.first_chunk + 1 >= wire.end_chunk;
  return small ? PushSmall(tensor, gradient) : PushInPortions(tensor, gradient);
}

absl::Status StepStream::MayPush(uint32_t tensor) const {
  if (!status_.ok()) return status_;
  if (!step_) {
    return absl::FailedPreconditionError(absl::StrCat("Push of ", tensors_.Name(tensor), " before BeginStep"));
  }
  return step_->MayPush(tensor);
}

absl::Status StepStream::NoMemoryFor(uint32_t tensor, uint64_t bytes) const {
  return absl::ResourceExhaustedError(
      absl::StrCat("Push of ", tensors_.Name(tensor), ": there is no host memory for a copy of ", bytes, " bytes"));
}

absl::Status StepStream::PushSmall(uint32_t tensor, absl::Span<const std::byte> gradient) {
  const WireTensor& wire = tensors_[tensor];
  FreedChunks freed(&memory_);  // outlives the lock
  try {
    std::vector<std::string> chunk =
        CutIntoChunks(tensors_, tensor, wire.first_chunk, wire.end_chunk, gradient, &memory_);
    if (auto s = memory_.status(); !s.ok()) return s;
    absl::MutexLock lock(&mu_);
    if (BufferIsFull()) AwaitRoom();
    if (auto s = MayPush(tensor); !s.ok()) return s;
    step_->Push(tensor, std::move(chunk), freed.get());
    Release(freed.get());
  } catch (const std::bad_alloc&) {
    return NoMemoryFor(tensor, gradient.size());
  }
  return absl::OkStatus();
}

absl::Status StepStream::PushInPortions(uint32_t tensor, absl::Span<const std::byte> gradient) {
  const WireTensor& wire = tensors_[tensor];
  {
    absl::MutexLock lock(&mu_);
    if (auto s = MayPush(tensor); !s.ok()) return s;
  }
  const uint64_t chunk_bytes = tensors_.chunk_elements() * wire.gradient_element_bytes;
  uint64_t first = wire.first_chunk;
  try {
    do {  // the writer sends what is there, while the next is copied
      if (first < wire.end_chunk && SendNow(tensor, CutChunk(tensors_, tensor, first, gradient))) {
        ++first;
        continue;
      }
      const uint64_t portion = first < wire.end_chunk ? AwaitPortion(chunk_bytes) : 1;
      if (portion == 0) continue;
      const uint64_t last = std::min(wire.end_chunk, first + portion);
      std::vector<std::string> chunks = CutIntoChunks(tensors_, tensor, first, last, gradient, &memory_);
      FreedChunks freed(&memory_);
      if (auto s = memory_.status(); !s.ok()) FailAndLeave(s);  // a part of the gradient may have left
      absl::MutexLock lock(&mu_);
      if (!status_.ok()) return status_;
      step_->Push(tensor, std::move(chunks), freed.get());
      Release(freed.get());
      first = last;
    } while (first < wire.end_chunk);
  } catch (const std::bad_alloc&) {
    const absl::Status none = NoMemoryFor(tensor, gradient.size());
    if (first > wire.first_chunk) FailAndLeave(none);  // a part of it may have left
    return none;
  }
  return absl::OkStatus();
}

uint64_t StepStream::AwaitPortion(uint64_t chunk_bytes) {
  absl::MutexLock lock(&mu_);
  if (BufferIsFull()) {
    AwaitRoom();
    return 0;
  }
  const bool fits = step_ && step_->kept_bytes() + kCutTogether * chunk_bytes <= options_.gradient_buffer_bytes;
  return fits ? kCutTogether : 1;
}

bool StepStream::BufferIsFull() const {
  return step_ && status_.ok() && step_number_ > waits_after_ && !step_->all_sent() && !step_->lacks_wanted() &&
         step_->kept_bytes() >= options_.gradient_buffer_bytes;
}

// The daemon takes nothing while it waits for a rank that is behind. That one may wait for this rank: in a collective call
// between two gradients that the ranks make in different orders.
void StepStream::AwaitRoom() {
  const auto room = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return !BufferIsFull(); };
  uint64_t least = step_->kept_bytes();
  absl::Time since = SteadyNow();
  while (!mu_.AwaitWithTimeout(absl::Condition(&room), Connection::kInterruptGlance)) {
    if (!open_ || step_->kept_bytes() < least) {  // a lost connection comes back, or the client fails
      least = step_->kept_bytes();
      since = SteadyNow();
    }
    const bool stands_still = SteadyNow() - since >= absl::Seconds(options_.gradient_wait_s);
    if (stands_still) waits_after_ = std::numeric_limits<uint64_t>::max();
    mu_.Unlock();
    if (stands_still) LogStandstill(least);
    const bool interrupted = connection_.Interrupted();
    mu_.Lock();
    if (interrupted) waits_after_ = std::max(waits_after_, step_number_);
  }
}

void StepStream::LogStandstill(uint64_t kept_bytes) const {
  connection_.Log(
      absl::StrFormat("rank %d of run '%s': %d bytes of gradients wait here, and the daemon has taken none for %g s: "
                      "from now on as many are kept as there are (gradient_buffer_bytes), in case another rank "
                      "waits for this one",
                      options_.rank, options_.run_id, kept_bytes, options_.gradient_wait_s));
}

bool StepStream::AwaitTurn() {
  for (;;) {
    {
      absl::MutexLock lock(&mu_);
      const auto idle = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return !writing_; };
      if (!open_ || !call_->transport->has_rooms() || !step_) return false;
      if (!step_->all_sent() && !step_->MayGather()) return false;  // the writer is busy
      if (!mu_.AwaitWithTimeout(absl::Condition(&idle), kTurn) || !open_) return false;
      if (!call_->transport->writes_at_once()) return false;
      if (!WriterHasWork()) return step_ && step_->all_sent();
    }
    WriteTurn();
  }
}

bool StepStream::SendNow(uint32_t tensor, absl::Span<const std::byte> chunk) {
  if (chunk.size() < kLeastSentNow) return false;
  try {
    return AwaitTurn() && SendInTurn(tensor, chunk);
  } catch (const std::bad_alloc&) {
    GiveTurnUp(absl::ResourceExhaustedError("there was no host memory to send a gradient with"));
    throw;
  }
}

bool StepStream::SendInTurn(uint32_t tensor, absl::Span<const std::byte> chunk) {
  v1::TrainRequest request;
  std::shared_ptr<Call> call;
  std::shared_ptr<OpenStep> step;
  std::optional<GradientRoom> room;
  ChunkRef id;
  {
    absl::MutexLock lock(&mu_);
    if (!open_ || writing_ || !step_ || !step_->MaySendNow(chunk.size(), Allowance())) return false;
    call = call_;
    step = step_;
    room = call->transport->Reserve(chunk.size(), /*keep=*/true);
    if (!room) return false;
    writing_ = true;
    credit_ = Allowance();
    id = step_->PushSent(tensor, chunk.size(), *room, &credit_, &request);
  }
  const absl::StatusOr<uint32_t> crc = call->transport->Fill(*room, chunk);
  if (!crc.ok()) {
    GiveTurnUp(crc.status());
    return false;  // the next look at the step tells why
  }
  request.mutable_gradient()->set_crc32c(*crc);
  const bool alive = call->transport->WriteAt(*room, chunk.size(), request);
  absl::MutexLock lock(&mu_);
  EndTurn(alive);
  if (step == step_) step_->SetChecksum(id, *crc);
  return true;
}

void StepStream::GiveTurnUp(absl::Status why) {
  {
    absl::MutexLock lock(&mu_);
    EndTurn(/*alive=*/false);
  }
  FailAndLeave(std::move(why));
}

void StepStream::FailAndLeave(absl::Status why) {
  Fail(std::move(why));
  Cancel();
}

}  // namespace ballast
