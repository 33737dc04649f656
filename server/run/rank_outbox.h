// What goes out on a rank's stream, and in which order: control first, then weights tensor by tensor, then the
// step's result. Weights are encoded on demand, a few chunks ahead of the write, into the strings that were
// reserved with the run, or where the stream lends memory: no queue of payload, whatever the reader's pace. Small
// tensors have kSmallSendBuffers of their own, so that the device makes many of them before the strand hears of it.
//
// Strand-confined. A buffer belongs to the outbox, to a device task (encoding) or to the stream (writing), in turn.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/run/rank_stream.h"
#include "server/store/parameter_store.h"

namespace ballast {

class RankOutbox {
 public:
  struct Environment {
    const RunSpec* spec;
    ParameterStore* store;
    std::function<void(uint64_t bytes)> on_sent;  // payload of a weights chunk left
    std::function<void()> settle;                 // Pump could go on
  };
  RankOutbox(Environment environment, const Plan& plan);

  void Bind(std::shared_ptr<RankStream> stream);  // what was queued for the stream before is dropped
  void Unbind();

  void Open() { opened_ = true, Pump(); }
  void Credit(uint64_t bytes) { credit_bytes_ += bytes; }               // goes out with the next Pump
  void Want(const ChunkId& id) { wanted_ = id; }                        // likewise
  void Acknowledge() { ++acknowledged_; }                               // likewise: one more gradient is taken in
  void Receive(ChunkSet receives) { receives_ = std::move(receives); }  // what of the weights, from now on
  void Tell(const output::Measured& measured) { measured_ = measured; }
  // `waits`: for Release, since the trainer may not be done with the weights that it has.
  void Publish(uint64_t step, uint32_t tensor, bool waits = false);
  // The trainer has made all gradients of its step, or the step has closed.
  void Release();
  void Result(StepRecord result) { results_.push_back(std::move(result)); }
  void Drain(std::string reason) { drain_ = std::move(reason); }
  // While held, weights and results wait.
  void Hold(bool held) { held_ = held; }
  // The rank has the weights of all earlier steps: those still queued need not go.
  void DropPublished();
  // Starts what can be started. After any of the above.
  void Pump();
  // The stream's write is over.
  void OnWritten(const RankStream* stream);

  // Nothing queued, encoding or being written.
  bool idle() const;
  uint64_t buffer_bytes() const { return buffer_bytes_; }  // reserved

 private:
  enum class BufferState { kFree, kEncoding, kReady, kWriting };
  struct Buffer {
    BufferState state = BufferState::kFree;
    bool small = false;
    bool stale = false;  // of a stream or step that is over: free it instead of sending it
    WeightsChunk chunk;
    WeightPiece piece;
    std::shared_ptr<RankStream> stream;  // whose piece it is, unless kFree
  };
  struct Published {
    uint64_t step = 0;
    uint32_t tensor = 0;
  };

  // The first chunk from `from` on that the rank receives some of; none: the tensor has no more of them.
  std::optional<uint64_t> NextReceived(uint32_t tensor, uint64_t from) const;
  // Of the first tensor's chunk that goes out next, what the rank receives.
  ChunkPart PartOfNext(uint64_t* chunk) const;
  bool NextIsCut() const;
  void Encode();
  void EncodeNextChunk(Buffer* buffer);
  void Encoded(Buffer* buffer);
  // Not to be written after all.
  void Discard(Buffer* buffer);
  void TakeBack(Buffer* buffer);
  void Free(Buffer* buffer);
  // Whether another write may follow at once.
  bool WriteNext();
  bool WriteChunk();
  bool Went(Written written);
  std::optional<StreamOutput> NextControl();

  const Environment environment_;
  std::shared_ptr<RankStream> stream_;
  ChunkSet receives_;
  bool writing_ = false;
  bool unflushed_ = false;
  bool held_ = false;
  bool opened_ = false;
  uint64_t credit_bytes_ = 0;
  std::optional<ChunkId> wanted_;
  uint64_t acknowledged_ = 0, acknowledgement_sent_ = 0;  // gradients of the stream
  std::optional<output::Measured> measured_;
  std::optional<std::string> drain_;
  std::deque<StepRecord> results_;
  std::deque<Published> tensors_, waiting_;
  uint64_t next_chunk_ = 0;  // of tensors_.front()
  uint64_t buffer_bytes_ = 0;
  std::vector<Buffer> buffers_;  // as many as the plan counts; they stay where they are
  std::vector<Buffer*> free_large_, free_small_;
  std::deque<Buffer*> begun_;  // kEncoding or kReady, and not stale; they go out in this order
};

}  // namespace ballast
