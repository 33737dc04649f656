// Carries out what the step machine decides, for one run: stores gradients in the reduce pool, sends updates to the
// device, publishes weights, reports closed steps. Messages of the rank's stream come in; effects go out to the stream.
//
// A gradient whose tensor finds no room in its shard's pool is parked, with all that follows it, until an update frees
// a slab. When no update is under way that would, the stream ends with RESOURCE_EXHAUSTED naming the half-sent tensors:
// parking never becomes a hang. What is parked is bounded by the stream, which stops reading.
//
// Strand-confined.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/parameter_store.h"
#include "server/rank_stream.h"
#include "server/reduce_pool.h"
#include "server/run_status.h"
#include "server/sender.h"
#include "server/step_machine.h"
#include "server/step_statistics.h"

namespace ballast {

class StepRunner {
 public:
  struct Environment {
    const RunSpec* spec;
    const LayerGroups* layers;
    ParameterStore* store;
    std::vector<DeviceBuffer> pools;  // by shard
    const Plan* plan;
    RunMetrics* metrics;
    RunStatusBoard* board;
  };
  struct AttachOutcome {
    absl::Status status;
    double retry_after_s = 0;
    SessionId session = {};
    bool resumed = false;
  };

  explicit StepRunner(Environment environment);

  AttachOutcome Attach(const event::Attach& attach, const std::string& peer);
  void OpenStream(const std::shared_ptr<RankStream>& stream, const event::StreamOpened& opened);
  void OnMessage(const std::shared_ptr<RankStream>& stream, RankMessage message);
  void OnWritten(const RankStream* stream);
  void OnInputClosed(const RankStream* stream);
  void OnStreamGone(const RankStream* stream);
  void Tick();

  void set_weights_loaded(bool loaded) { weights_loaded_ = loaded; }
  // No new step begins; `done` once no step is open and all is sent, or the rank is away.
  void Drain(std::function<void()> done);
  // Ends the stream with this status, now.
  void End(absl::Status status);

  const StepMachine& machine() const { return machine_; }
  const std::optional<ClosedStep>& last_result() const { return last_result_; }
  uint64_t pool_bytes() const;
  uint64_t slot_bytes() const { return sender_.slot_bytes(); }

 private:
  struct Tensor {
    std::optional<Slab> slab;  // while chunks come in
    bool begun = false;        // its update of the open step was submitted
  };
  struct Pool {
    DeviceBuffer memory;
    ReducePool slabs;
  };
  struct StepClock {
    double begin_s = 0, first_byte_s = 0, last_byte_s = 0, last_update_s = 0, update_s = 0;
  };

  // Each returns whether the message was taken; false: park it.
  bool Take(message::StepBegin& m);
  bool Take(message::Gradient& m);
  bool Take(message::MicroEnd& m);
  bool Take(message::StepEnd& m);
  bool Take(message::Ignored& m);
  bool Take(message::Bad& m);
  void TakeParked();

  // Executes the effects; a refusal ends the stream.
  void HandleFromStream(const StepEvent& event);
  absl::Status Execute(StepEffects effects);
  void Do(const effect::Fence& e);
  void Do(const effect::Opened& e);
  void Do(const effect::Store& e);
  void Do(const effect::Duplicate& e);
  void Do(const effect::Update& e);
  void Do(const effect::Publish& e);
  void Do(const effect::Close& e);
  void Do(const effect::RepeatResult& e);
  void Do(const effect::Discard& e);

  void OnUpdated(uint64_t step, uint32_t tensor, Slab slab, const TaskResult& result);
  void DropStep();
  void Report(const effect::Close& e);
  void EndStream(absl::Status status);
  void Detach(absl::Status status);
  void Settle();
  void FinishWhenDone();
  void ShowRank();
  std::string DescribeHalfSent(uint32_t shard) const;
  uint32_t ShardOf(uint32_t tensor) const { return environment_.plan->placement.shard_of[tensor]; }
  Pool& PoolOf(uint32_t tensor) { return pools_[ShardOf(tensor)]; }

  Environment environment_;
  StepMachine machine_;
  std::vector<Pool> pools_;  // by shard
  Sender sender_;
  StepStatistics statistics_;
  std::vector<Tensor> tensors_;
  uint32_t updating_ = 0;  // submitted and not done, of any step
  bool weights_loaded_ = false;
  bool draining_ = false;
  std::function<void()> drained_;

  // The open step.
  std::vector<std::vector<double>> hyper_;
  double loss_scale_ = 1;
  std::optional<double> loss_;
  StepClock clock_;
  double learning_rate_ = 0;
  std::optional<ClosedStep> last_result_;

  // The stream, and the message in hand.
  std::shared_ptr<RankStream> stream_;
  SessionId stream_session_ = {};
  bool input_closed_ = false;
  std::deque<RankMessage> parked_;
  message::Gradient* gradient_ = nullptr;
  std::string peer_;
  struct Leaving {
    std::shared_ptr<RankStream> stream;
    double cancel_at_s = 0;
  };
  std::vector<Leaving> leaving_;  // told to end; cancelled when they do not
};

}  // namespace ballast
