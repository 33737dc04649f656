// One Train stream over memory shared with a trainer on this host: the transport that copies nothing here. Gradients
// are borrowed where they lie until they are summed, weights are encoded where the trainer reads them. Slots that are on_gpu
// only the run's device touches: payloads there have no checksum.
//
// The thread of each stream checks what the trainer sends, posts it to the run's strand, and writes on what found no
// room in the pipe; RankStream is called on the strand. It sleeps while there is nothing to do. Every path comes to
// OnStreamGone once.
//
// A stream whose first message is not there within open_timeout_s is ended.
//
// All that the trainer can write is hostile: see proto/shm/record.h and proto/shm/slots.h for what is checked, and
// AddRankMessages for gradients that change after the check. The daemon's memory beyond the segment: kMostUnconsumed
// messages and those of the record being read, the one being written, and small ones that wait for Flush.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "proto/shm/bell.h"
#include "proto/shm/pulse.h"
#include "proto/shm/record.h"
#include "proto/shm/slots.h"
#include "proto/shm/socket.h"

#include "ballast/v1/trainer.pb.h"
#include "server/device/shared_memory.h"
#include "server/rpc/rpc.h"
#include "server/run/rank_stream.h"

namespace ballast {

class ShmStream final : public RankStream, public Payload::Lender, public std::enable_shared_from_this<ShmStream> {
 public:
  // Messages that the strand has not consumed: so many, or one that is too large for a batch (proto/batch.h).
  static constexpr int kMostUnconsumed = 256;
  struct Connection {
    ShmSocket socket;
    std::shared_ptr<ShmSegment> segment;
    std::unique_ptr<SharedMemory> gpu = nullptr;  // of slots that are on_gpu
    std::string why_no_gpu = {};                  // of others, where the trainer asked for those
    std::string token;  // that the trainer showed, of a session of the run that the segment is shaped for
    std::string peer;
    StreamPlace place = nullptr;  // in its caller's quota, while the stream lasts
  };

  // Takes the connection over. RESOURCE_EXHAUSTED: there is no thread for it, and the connection's socket stays.
  static absl::StatusOr<std::shared_ptr<ShmStream>> Start(const RpcEnvironment& environment, Connection* connection);

  // Sends the trainer its segment.
  absl::Status Grant() const;
  int fd() const { return connection_.socket.fd(); }
  const std::string& token() const { return connection_.token; }
  // Ends the stream, since the trainer is gone or the daemon stops, and waits for the thread. Call it once.
  void HangUpAndJoin();

  Written WriteWeights(const WeightsChunk& chunk, WeightPiece* piece) override;
  void TakeBack(WeightPiece* piece) override;
  bool Lend(WeightPiece* piece, bool small) override;
  void Unlend(WeightPiece* piece) override;
  Written Write(const StreamOutput& output) override;
  void Flush() override;
  void Finish(absl::Status status) override;
  void Cancel() override;
  void Consumed() override;
  const std::string& peer() const override { return connection_.peer; }
  const char* transport() const override { return on_device() ? "gpu" : "shm"; }
  bool full() const override { return borrower_.borrowed() + 1 >= borrower_.slots(); }
  bool on_device() const override { return connection_.gpu != nullptr; }

  void GiveBack(uint32_t slot) override { borrower_.GiveBack(slot); }
  void Read(absl::Span<const std::byte> borrowed, char* to) const override;

 private:
  ShmStream(const RpcEnvironment& environment, Connection connection);
  std::byte* GpuMemory() const;  // nullptr: none
  void Loop();
  void Nudge();
  std::chrono::milliseconds Patience() const;
  void EndUnopened();
  bool HasWork();
  bool Over();
  bool MayRead() const { return !input_over_ && unconsumed_ < most_unconsumed_; }
  void ReadRecords();
  absl::Status Take(const ShmRecord& record);
  void HandOver();
  absl::Status TakeMessage(const ShmRecord& record);
  absl::Status Bind();
  void Refuse(absl::Status status);
  // The record waits for Flush, unless much waits, or something waits for room.
  Written Send(const ShmRecord& record, absl::string_view body);
  // As a record of several; false: they are to go in one of their own.
  bool Gather(const v1::Weights& weights);
  void AddGathered() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Writes what waits. True: that answers a write.
  bool FlushLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void WriteOn();
  void TellRoom();
  void End();

  const RpcEnvironment environment_;
  Connection connection_;  // nothing of it changes while there is a thread
  ShmControl& control_;
  RpcRecord record_;

  // The thread's.
  ShmRecordReader reader_;
  ShmPulse pulse_;
  const double open_by_s_;
  v1::TrainRequest request_;
  std::vector<RankMessage> arrived_;  // for the strand
  bool input_over_ = false;
  bool takes_data_in_records_ = false, takes_small_weights_ = false;  // the trainer does; written before run_
  std::shared_ptr<Run> run_;  // from Open on; the strand's too, which hears of the stream by it

  ShmBorrower borrower_;
  ShmLender lender_;            // the strand's, like the next two
  v1::TrainResponse response_;  // of the write in hand
  std::string body_;
  v1::TrainResponse gathered_;  // small weights
  std::atomic<int> unconsumed_ = 0, most_unconsumed_ = kMostUnconsumed;
  std::atomic<bool> nudged_ = false;
  std::atomic<bool> gone_ = false;       // no peer any more
  std::atomic<bool> cancelled_ = false;  // nobody wants to hear the peer any more
  std::atomic<bool> starved_ = false;    // Lend was false
  std::atomic<uint64_t> returned_then_ = 0;

  absl::Mutex mu_;
  ShmRecordWriter writer_ ABSL_GUARDED_BY(mu_);
  bool owed_ ABSL_GUARDED_BY(mu_) = false;  // the answer to a write
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status ended_with_ ABSL_GUARDED_BY(mu_) = absl::CancelledError("the connection was lost");
  std::atomic<bool> writing_on_ = false;  // writer_ is not empty

  std::thread thread_;
};

}  // namespace ballast
