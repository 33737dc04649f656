// The open step as the trainer sees it: what was pushed, what was sent, which weights are back. Pure: no threads, no
// sockets. StepStream guards it by its lock.
//
// On the wire a step is StepBegin; for each micro-batch MicroBegin, the gradients' chunks and MicroEnd, which does not
// wait for credit; StepMeasure, where it is asked for; and StepEnd. One that discards the step goes next. NextRequest
// says which of these comes next; after a lost connection Resume starts from the top and leaves out the chunks that the
// daemon holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "ballast/v1/trainer.pb.h"
#include "client/cpp/client.h"
#include "client/cpp/stream/credit_window.h"
#include "client/cpp/stream/retransmit_buffer.h"
#include "client/cpp/wire/tensor_table.h"

namespace ballast {

class OpenStep {
 public:
  // `tensors` outlives the step; micros: its micro-batches; 0: as many as there are when it is measured or ended.
  OpenStep(const TensorTable& tensors, v1::StepBegin begin, uint32_t micros, absl::Time now);

  uint64_t number() const { return begin_.step(); }
  uint32_t micros() const { return buffer_.micro() + 1; }  // that have begun

  // The trainer's side.
  absl::Status MayPush(uint32_t tensor) const;
  bool pushed(uint32_t tensor) const { return buffer_.pushed(tensor); }
  // *freed: the chunks, where the daemon has closed the step already.
  void Push(uint32_t tensor, std::vector<std::string> chunks, Freed* freed);
  // All that was pushed has been handed to the transport.
  bool all_sent() const { return buffer_.all_sent(); }
  uint64_t kept_bytes() const { return buffer_.bytes(); }  // of gradients, in the client's own memory
  // The daemon goes on with a chunk that is still to be pushed.
  bool lacks_wanted() const { return wanted_ && !buffer_.has(*wanted_); }
  // Whether a chunk that is pushed now is the next that the wire is to carry, and may go.
  bool MaySendNow(uint64_t bytes, const CreditWindow& credit) const;
  // Push of one chunk of so many bytes that MaySendNow; its payload will be in the room.
  ChunkRef PushSent(uint32_t tensor, uint64_t bytes, const GradientRoom& room, CreditWindow* credit,
                    v1::TrainRequest* request);
  // Of such a chunk: it goes with it if it is sent again.
  void SetChecksum(const ChunkRef& id, uint32_t crc32c) { buffer_.SetChecksum(id, crc32c); }
  absl::Status MayEndMicro() const;
  void EndMicro(std::optional<double> loss, bool next_is_last = false);
  absl::Status MayMeasure() const;
  std::future<absl::StatusOr<MeasuredStep>> Measure(std::optional<double> loss, absl::Time now);
  absl::Status MayEnd(bool discard) const;
  bool ended() const { return ended_at_.has_value(); }
  // The last micro-batch has ended.
  bool pushed_all() const { return asked() || ended(); }
  // *freed: as in Acknowledge.
  std::future<absl::StatusOr<StepResult>> End(std::optional<double> loss, v1::StepEnd end, absl::Time now,
                                              Freed* freed);

  // The writer's side. HasRequest: NextRequest would fill *request. Sent: that request was handed to the transport.
  bool HasRequest(const CreditWindow& credit) const;
  // Whether requests may wait a moment for more: all are small gradients, and others are being made.
  bool MayGather() const;
  void NextRequest(CreditWindow* credit, v1::TrainRequest* request);
  void Sent(v1::TrainRequest* request);
  // The daemon has taken in so many gradients of the stream, as CreditWindow::sent counts them. *freed: what is no longer
  // needed; memory is for the caller to destroy without the lock.
  void Acknowledge(uint64_t gradients, Freed* freed);
  void Want(const ChunkRef& id) { wanted_ = id; }
  // The transport is about to go, with its rooms.
  void LeaveRooms(ChunkMemory* memory) { buffer_.LeaveRooms(memory); }

  // The reader's side. INTERNAL when the message is not one that this step can get.
  // `data_bytes`: of its payload.
  absl::Status CheckWeights(const v1::Weights& weights, uint64_t data_bytes) const;
  // Notes weights that were checked and written where they belong. False: they had arrived before.
  bool Received(const v1::Weights& weights, uint64_t data_bytes);
  // Answers Measure. An answer that comes again, after a resume, is the same.
  void SetMeasured(const v1::StepMeasured& measured);
  void SetUnmeasured();
  // *freed: as in Acknowledge.
  absl::Status SetResult(const v1::StepResult& result, Freed* freed);
  bool weights_in(uint32_t tensor) const { return arrivals_[tensor].count == tensors_[tensor].held_chunks(); }
  bool done() const { return ended() && result_.has_value(); }
  void Finish(absl::StatusOr<StepResult> result) { promise_.set_value(std::move(result)); }
  // Whoever waits for Measure hears this; a step that has its answer keeps it.
  void FinishMeasure(absl::StatusOr<MeasuredStep> measured);
  StepResult result(absl::Time now) const;

  bool has_result() const { return result_.has_value(); }
  // A session was granted again: fills in *open, and starts over with what the daemon lacks. If the step has closed,
  // and perhaps others after it, the stream brings its result and weights. Later steps were made without this rank, and
  // brought it none.
  absl::Status Resume(const v1::AttachResponse& grant, v1::Open* open);

 private:
  // kGradients: and MicroEnd, after them or, once the micro-batch has ended, before what waits for credit.
  enum class Next { kStepBegin, kMicroBegin, kGradients, kStepMeasure, kStepEnd, kNothing };
  struct Arrivals {
    absl::InlinedVector<bool, 8> chunks;  // empty before the first
    uint64_t count = 0;
  };

  bool MayGo(const ChunkRef& id, const CreditWindow& credit) const;
  // All chunks of the micro-batch that is being sent have left.
  bool MicroSent() const { return buffer_.all_sent() || buffer_.next().micro != sending_; }
  bool MicroEnded() const { return sending_ < buffer_.micro() || pushed_all(); }
  bool MicroEndIsDue() const { return MicroEnded() && !micro_end_sent_; }
  bool WantedIsQueued() const { return wanted_ && buffer_.queued(*wanted_); }
  bool asked() const { return measured_promise_.has_value(); }
  absl::Status MayEndLast(const char* call) const;
  void EndLast(absl::Time now);
  Next AfterMicro();
  void Spend(const ChunkRef& id, CreditWindow* credit);
  void FillHeader(const ChunkRef& id, v1::Gradient* gradient) const;
  absl::Status RequeueAllBut(const v1::AttachResponse& grant);
  void FillMicroEnd(v1::MicroEnd* end) const;
  void NextOfMicro(CreditWindow* credit, v1::TrainRequest* request);

  const TensorTable& tensors_;
  const v1::StepBegin begin_;
  uint32_t micros_;  // 0: not known
  v1::StepEnd end_;
  RetransmitBuffer buffer_;
  struct Unacknowledged {
    uint64_t number = 0;  // of the stream's gradients, from 1
    ChunkRef id;
  };
  std::deque<Unacknowledged> unacknowledged_;
  Next next_ = Next::kStepBegin;
  uint32_t sending_ = 0;                       // the micro-batch on the wire
  bool micro_end_sent_ = false;                // its MicroEnd
  std::optional<ChunkRef> wanted_;             // goes without credit
  std::vector<Arrivals> arrivals_;             // weights, by tensor
  std::vector<std::optional<double>> losses_;  // by micro-batch
  std::optional<v1::StepResult> result_;
  std::promise<absl::StatusOr<StepResult>> promise_;
  std::optional<std::promise<absl::StatusOr<MeasuredStep>>> measured_promise_;  // once Measure was called
  bool has_measured_ = false;                                                   // it has its answer
  const absl::Time began_at_;
  std::optional<absl::Time> ended_at_;
  StepTiming timing_;
};

}  // namespace ballast
