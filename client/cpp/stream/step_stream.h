// The Train stream of one session, for as long as the client lives: a reader thread that opens it, reads, and opens it
// again when the connection is lost, and a writer thread that sends what the open step has to send. Reading never waits
// for writing. Thread-compatible towards its caller; the two threads are its own.
//
// A gradient that may leave at once, over a transport that has room for it where the daemon reads it, is copied there by
// Push, which writes in the writer's place. Any other is copied into the step's buffer, for the writer; where that is full,
// Push waits for the daemon.
//
// The reader owns the order of events: it opens the stream, admits the writer when Opened came, sees the stream's end,
// waits for the writer to let go, and only then asks for the session again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

#include "ballast/v1/trainer.pb.h"
#include "client/cpp/client.h"
#include "client/cpp/stream/chunk_memory.h"
#include "client/cpp/stream/credit_window.h"
#include "client/cpp/stream/open_step.h"
#include "client/cpp/transport/connection.h"
#include "client/cpp/transport/transport.h"
#include "client/cpp/wire/tensor_table.h"

namespace ballast {

class StepStream {
 public:
  // Opens the transport for a stream of the granted session. The reader's thread calls it for each stream that it
  // opens. An error that IsLost accepts is tried again once a stream has been open.
  using OpenTransport = std::function<absl::StatusOr<std::unique_ptr<Transport>>(const v1::AttachResponse& grant)>;

  // Opens the stream of a session just granted; returns when it is open. `connection` outlives the stream. gpu: that of
  // AttachOptions::gpu; nullptr: none.
  static absl::StatusOr<std::unique_ptr<StepStream>> Start(Connection& connection, AttachOptions options,
                                                           const v1::AttachResponse& grant, TensorTable tensors,
                                                           OpenTransport open_transport,
                                                           std::shared_ptr<Gpu> gpu = nullptr);
  // Within 5 s. Ends the stream cleanly when no step is open, or once that is over which was ended. A session that has
  // ended by then stays so: its client attaches again.
  ~StepStream() { End(); }
  StepStream(const StepStream&) = delete;
  StepStream& operator=(const StepStream&) = delete;

  // The same for a client that leaves the run for good: the daemon is told so also where the session was ended by a
  // rewind, or with the daemon, or the connection is lost. Within 10 s. Afterwards nothing but the destructor is called.
  void Leave();

  const TensorTable& tensors() const { return tensors_; }
  std::string token() const;

  absl::Status BindWeights(uint32_t tensor, void* destination, uint64_t bytes);
  absl::Status BindServed(uint32_t tensor, void* codes, uint64_t bytes, absl::Span<float> scales);
  absl::Status BeginStep(const StepValues& values);
  absl::Status Push(uint32_t tensor, absl::Span<const std::byte> gradient);
  absl::Status EndMicro(std::optional<double> loss, bool next_is_last);
  std::future<absl::StatusOr<MeasuredStep>> MeasureStep(std::optional<double> loss);
  std::future<absl::StatusOr<StepResult>> EndStep(std::optional<double> loss, const StepEndValues& values);

  absl::StatusOr<bool> AwaitWeights(uint32_t tensor, absl::Duration timeout);

  // To be called between steps: drops the stream, resumes the session, and returns the answer, with digests. An error:
  // why the client failed. `progress`: something succeeded since the last time, so that reconnect_timeout_s begins
  // anew; without any progress this ends like every lost connection. CANCELLED: the caller was interrupted.
  absl::StatusOr<v1::AttachResponse> AttachAgain(bool progress);
  // What was done over the resumed session has succeeded: after the next loss, reconnect_timeout_s begins anew.
  void CountAsProgress() {
    absl::MutexLock lock(&mu_);
    Progress();
  }

  uint64_t step() const;
  bool shares_gpu() const;
  absl::Status status() const;
  // FAILED_PRECONDITION: a step is open here, of which the daemon may not have heard. Else status().
  absl::Status CheckBetweenSteps(absl::string_view call) const;
  // Waits until the stream is open, or the client has failed, or for so long; then false.
  bool AwaitConnected(absl::Duration timeout);
  // Waits until the daemon has ended the session, or for so long.
  void AwaitEnd(absl::Duration timeout) const;

 private:
  // Where a tensor's weights go; nowhere where `weights` is nullptr.
  struct Destination {
    std::byte* weights = nullptr;
    float* scales = nullptr;
    bool as_served = false;
    bool on_gpu = false, scales_on_gpu = false;
  };
  struct Call {
    const absl::Time began = SteadyNow();
    std::unique_ptr<Transport> transport;
  };
  // What is written without the lock: a request of the step, or several small ones; none: the stream's end.
  struct Turn {
    std::shared_ptr<Call> call;
    std::shared_ptr<OpenStep> step = nullptr;
    std::vector<v1::TrainRequest> requests = {};
    std::optional<GradientRoom> room = {};  // of the last
    bool more = false;                      // follow at once
    bool joins = false;                     // small gradients may go as one request
  };
  // How a stream ended.
  struct Ending {
    absl::Status status;
    bool lost = false;  // the session may be resumed
    bool opened = false;
  };

  StepStream(Connection& connection, AttachOptions options, TensorTable tensors, OpenTransport open_transport,
             std::shared_ptr<Gpu> gpu);

  absl::Status BetweenSteps(absl::string_view call) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Bind(uint32_t tensor, Destination destination);
  absl::Status AwaitOpened();
  void Fail(absl::Status status);
  void End();
  // Whether the daemon is to hear by another way that the rank is left, and how long that is tried; none: it need not.
  std::optional<absl::Duration> GoodbyeOwed() const ABSL_LOCKS_EXCLUDED(mu_);
  void FailAndLeave(absl::Status why);  // ends the stream, too, so that nobody waits for this rank

  // The reader's thread.
  void Read(v1::AttachResponse grant);
  Ending Serve(const v1::AttachResponse& grant);
  absl::Status Adopt(const v1::AttachResponse& grant, v1::Open* open) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Ending Hang(Call& call, absl::Status refused);
  Ending Closed(const absl::Status& status);  // by the client, and the daemon answered so
  // `data`: the payload of weights; on_gpu as in OnWeights.
  absl::Status Handle(const v1::TrainResponse& response, absl::Span<const std::byte> data, bool on_gpu);
  absl::Status OnOpened(const v1::Opened& opened);
  absl::Status OnSmallWeights(const v1::SmallWeights& weights);
  // on_gpu: `data` is in the memory of a GPU, and has no checksum.
  absl::Status OnWeights(const v1::Weights& weights, absl::Span<const std::byte> data, bool on_gpu = false);
  // Without a detour through other memory where nothing is to be decoded.
  absl::Status Land(const v1::Weights& weights, absl::Span<const std::byte> data, bool on_gpu,
                    const Destination& destination) const;
  std::byte* PlaceOf(const v1::Weights& weights, const Destination& destination) const;
  absl::Status LandScales(const v1::Weights& weights, const Destination& destination) const;
  absl::Status DecodeTo(const v1::Weights& weights, absl::Span<const std::byte> codes, std::byte* out) const;
  absl::Status DecodeByGpu(const v1::Weights& weights, absl::Span<const std::byte> data, bool on_gpu,
                           const Destination& destination) const;
  absl::Status OnResult(const v1::StepResult& result);
  absl::Status OnCredit(const v1::Credit& credit);
  absl::Status OnMeasured(const v1::StepMeasured& measured);
  // Whether the run and the daemon have what only staged runs have, and newer daemons.
  absl::Status CheckMeasures(absl::string_view what) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits before it asks again. False: the client is being closed.
  bool WaitToAsk(absl::Duration pause) ABSL_LOCKS_EXCLUDED(mu_);
  // Whether the daemon takes the stream later, and the time that it named, or `most`, is over; false also if that takes it too
  // long. *since: since when; none at first.
  bool WaitPutOff(const absl::Status& why, absl::Duration most, std::optional<absl::Time>* since)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<v1::AttachResponse> Resume(const absl::Status& why);
  // Tells the daemon that this process lives, until the client is closed: a rewind has ended the session, and the trainer
  // may come back much later.
  void KeepAlive(absl::Duration every) ABSL_LOCKS_EXCLUDED(mu_);
  // What `ask` answers, given the session's token, within so long; closing the client cancels it. CANCELLED: it is being
  // closed.
  absl::Status Ask(absl::Duration within,
                   absl::FunctionRef<absl::Status(const std::string& token, grpc::ClientContext* context)> ask)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Adds what a person needs to know, if there is more to say.
  absl::Status Explain(const absl::Status& why) const;
  absl::StatusOr<v1::AttachResponse> AskOnce(absl::Duration timeout);
  void Progress() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { retry_ = {}; }
  // Takes the done step out; the caller finishes it without the lock.
  std::shared_ptr<OpenStep> TakeStep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // The writer's thread, and Push.
  void Write();
  CreditWindow Allowance() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool HasMore() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // As many gradients wait here as may, and all that the daemon needs of this rank to take them is pushed.
  bool BufferIsFull() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Until it is not, or the caller is interrupted, or the daemon has taken nothing for too long. Requires that it is.
  void AwaitRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // How many chunks of so many bytes are to be copied now. 0: it has waited, and the next may leave at once by now.
  uint64_t AwaitPortion(uint64_t chunk_bytes) ABSL_LOCKS_EXCLUDED(mu_);
  void LogStandstill(uint64_t kept_bytes) const ABSL_LOCKS_EXCLUDED(mu_);
  bool WriterHasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return HasMore() && !writing_; }
  // Waits for more small gradients, so that the daemon wakes to several. Whoever pushes is not held up.
  void Gather() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void WriteTurn();
  // Writes its requests. False: as Transport::Write. An error as in Transport::Fill.
  absl::StatusOr<bool> Write(Turn* turn);
  Turn TakeTurn() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Turn HalfClose() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status MayPush(uint32_t tensor) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status NoMemoryFor(uint32_t tensor, uint64_t bytes) const;
  // A gradient of one chunk that gathers with others; any other.
  absl::Status PushSmall(uint32_t tensor, absl::Span<const std::byte> gradient);
  absl::Status PushInPortions(uint32_t tensor, absl::Span<const std::byte> gradient);
  // Whether a chunk that is pushed now is the next to be written, and Push may write it; writes what comes before it.
  bool AwaitTurn();
  // False: the chunk is not sent, and to be buffered. std::bad_alloc: as in GiveTurnUp.
  bool SendNow(uint32_t tensor, absl::Span<const std::byte> chunk);
  bool SendInTurn(uint32_t tensor, absl::Span<const std::byte> chunk);
  void EndTurn(bool alive) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Who was writing cannot go on: nobody knows what has left, so the client fails.
  void GiveTurnUp(absl::Status why);
  // The slots; the memory is for the caller.
  void Release(Freed* freed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool MayHalfClose() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  void Cancel();

  Connection& connection_;
  const AttachOptions options_;
  const TensorTable tensors_;
  const absl::Time attached_at_;
  const OpenTransport open_transport_;  // the reader's
  const std::shared_ptr<Gpu> gpu_;
  ChunkMemory memory_;

  mutable absl::Mutex mu_;
  std::string token_ ABSL_GUARDED_BY(mu_);
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  bool measures_steps_ ABSL_GUARDED_BY(mu_) = false;    // AttachResponse.measures_steps
  uint64_t step_number_ ABSL_GUARDED_BY(mu_) = 0;       // 0 until the first grant
  uint64_t closed_elsewhere_ ABSL_GUARDED_BY(mu_) = 0;  // the last step that closed, as far as this rank was told
  // Set from BeginStep to its result. Code that let go of the lock in between must compare the pointer to know that
  // this is still the same step: by then the next one may be open.
  std::shared_ptr<OpenStep> step_ ABSL_GUARDED_BY(mu_);
  std::vector<Destination> bound_ ABSL_GUARDED_BY(mu_);  // by tensor
  CreditWindow credit_ ABSL_GUARDED_BY(mu_);

  std::shared_ptr<Call> call_ ABSL_GUARDED_BY(mu_);                   // to write to and to cancel
  std::shared_ptr<grpc::ClientContext> asking_ ABSL_GUARDED_BY(mu_);  // of Ask
  bool attach_again_ ABSL_GUARDED_BY(mu_) = false;                    // the next one is AttachAgain's
  std::optional<v1::AttachResponse> attached_again_ ABSL_GUARDED_BY(mu_);
  bool open_ ABSL_GUARDED_BY(mu_) = false;  // Opened came and the stream has not ended
  bool opened_once_ ABSL_GUARDED_BY(mu_) = false;
  bool takes_small_gradients_ ABSL_GUARDED_BY(mu_) = false;  // Opened says so
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t waits_after_ ABSL_GUARDED_BY(mu_) = 0;  // step up to which Push keeps what there is, and does not wait
  bool half_closed_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time opened_by_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();  // else the writer cancels the call
  bool leaving_ ABSL_GUARDED_BY(mu_) = false;                           // the destructor runs
  bool was_open_ ABSL_GUARDED_BY(mu_) = false;                          // when that began
  bool in_step_ ABSL_GUARDED_BY(mu_) = false;                           // when the wait for its end was over
  bool goodbye_heard_ ABSL_GUARDED_BY(mu_) = false;                     // by the daemon
  bool reader_done_ ABSL_GUARDED_BY(mu_) = false;

  // Attempts to replace the lost connection since the last progress.
  struct Retry {
    int attempts = 0;
    absl::Duration away;
  };
  Retry retry_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Time> lost_at_ ABSL_GUARDED_BY(mu_);  // while it is announced as lost
  std::string drain_reason_ ABSL_GUARDED_BY(mu_);

  std::thread reader_;
  std::thread writer_;
};

}  // namespace ballast
