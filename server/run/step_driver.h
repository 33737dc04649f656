// Drives a run's steps: hands what the ranks' streams bring to the executor, in turn, until nothing more can be taken,
// and begins and ends the streams.
//
// A rank that is out of credit is told which chunk it may send nevertheless. The stream of one that sends more is not
// read on until there is room, and ends with RESOURCE_EXHAUSTED where the chunk that sums wait for is behind.
//
// Strand-confined.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"

#include "server/run/rank_stream.h"
#include "server/run/rewinder.h"
#include "server/run/step_executor.h"
#include "server/step/step_machine.h"

namespace ballast {

class StepDriver {
 public:
  explicit StepDriver(StepExecutor::Environment environment);
  StepDriver(const StepDriver&) = delete;
  StepDriver& operator=(const StepDriver&) = delete;

  StepExecutor::AttachOutcome Attach(const event::Attach& attach, const std::string& peer);
  void OpenStream(const std::shared_ptr<RankStream>& stream, const event::StreamOpened& opened);
  // What follows from these, and from the devices' answers, is done by SettleIfDue, once for many of them: to be called
  // before anything else here, and soon.
  void OnMessages(const std::shared_ptr<RankStream>& stream, std::vector<RankMessage> messages);
  void OnWritten(const RankStream* stream);
  void OnRoom() { due_ = true; }
  void SettleIfDue();
  void OnInputClosed(const RankStream* stream);
  void OnStreamGone(const RankStream* stream);
  void Tick();
  void ShowAwaited();
  // Readers that follow the run have come, gone or got on: a version may be wanted, once this turn of the strand is over.
  void OnFollowers() { due_ = true; }

  // As soon as the event in hand is done with and no step is being judged. Every session ends with proto/rewound.h's
  // status; updates under way are done first, and undone. FAILED_PRECONDITION names the snapshots kept.
  void Rewind(RewindOrder order, RewindDone done);
  // As long as they are not, no step begins, and what ranks are owed of weights and results waits.
  void set_weights_loaded(bool loaded);
  // Calls `done` once every connected rank has been sent all that it is owed and no update goes on; sooner, where a
  // step is open or weights are not loaded. An error: the run has ended.
  void WhenQuiet(absl::AnyInvocable<void(absl::Status)> done);
  // From now on weights and state are written from outside, and StepBegins wait. Snapshots are completed first. While
  // no step is open, and quiet.
  void BeginReplacement();
  // `whole`: every session ends, as by a rewind to the last step. Otherwise they go on, as far as they can.
  void EndReplacement(bool whole);
  // While held, StepBegins wait; to be held while no step is open, and quiet.
  void HoldSteps(bool held);
  // Every session ends, as by a rewind to the last step. While quiet, and no step is open; then never refused.
  absl::Status EndSessions() { return executor_.Handle(event::Rewind{machine().step() - 1}); }
  // As in Checkpointer. FAILED_PRECONDITION: the daemon has no storage, or no step has closed.
  void Checkpoint(CheckpointTrigger trigger, Checkpointer::Done done);
  // The last step is written, before the run goes: one that has updated some tensor closes first, for `why`, and until
  // `done` none begins. OK also where there is nothing to write: no step has closed. Any error: steps will be missed.
  void WriteLast(std::string why, absl::AnyInvocable<void(absl::Status)> done);
  // As in StepGate.
  void set_lacks_added(std::string why) { executor_.gate().set_lacks_added(std::move(why)); }
  // No new step begins; `done` once no step is open and all is sent, or the rank is away.
  void Drain(std::function<void()> done);
  // Ends every stream with this status, now.
  void End(const absl::Status& status);

  // Of an amended run, before anything else.
  void GoOnFrom(StepExecutor::Past past) { executor_.GoOnFrom(std::move(past)); }
  void GoOnFrom(const RunFigures& figures, CheckpointWritten from) { executor_.GoOnFrom(figures, std::move(from)); }
  StepExecutor& executor() { return executor_; }
  const StepExecutor& executor() const { return executor_; }
  const StepMachine& machine() const { return executor_.machine(); }
  // As in Run. A rewind may have ended the session of a rank whose process lives, and has not come back yet.
  absl::Status KeepAlive(SessionId session) { return executor_.Handle(event::KeepAlive{session}); }
  absl::Status CheckUnattended() const;
  RunActivity::Ranks CountRanks() const { return executor_.CountRanks(); }
  void ShowState() { executor_.ShowState(); }

 private:
  void TakeParked(uint32_t rank);
  // For lack of room, or for the other ranks.
  bool MustWait(const RankLink& link, const RankMessage& message) const;
  void RefuseStuck(uint32_t rank);
  void OfferWanted(uint32_t rank);
  void LeaveOldStream(uint32_t rank);
  void EndStream(uint32_t rank, absl::Status status);
  void AnswerQuiet();
  // Where the last step is to be written.
  void CloseTorn();
  // After whatever happened.
  void Settle();
  void FinishWhenDone(uint32_t rank);
  void FinishWhenDrained();

  const RunSpec* const spec_;
  StepExecutor executor_;
  RankLinks& links_;  // the executor's
  bool due_ = false;  // Settle
  std::string ends_;  // why the last step is to be written; empty: it is not
  std::function<void()> drained_;
  std::vector<absl::AnyInvocable<void(absl::Status)>> quiet_;
};

}  // namespace ballast
