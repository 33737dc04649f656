// One daemon of a run on several: what ranks ask of it, what it keeps on its disk, and how it dies and comes back.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>

#include "client/cpp/client.h"
#include "tests/server/step/parts_simulator.h"
#include "tests/server/step/step_simulator_daemon.h"

namespace ballast::sim {

// What one part made of a step.
struct ClosedPart {
  uint64_t number = 0;  // of this closing; no other one has it, of any part
  uint64_t step = 0;
  Outcome outcome = Outcome::kApplied;
  std::string reason = {};
  std::vector<uint32_t> not_applied = {};
  bool updated = false;                // some tensor
  std::optional<Outcome> judged = {};  // the verdict, where there was one
  uint64_t taken_back = 0;             // when the part last was, counted as `number` is
  // Closed as torn while a rank was there that could have brought the verdict.
  bool torn_before_ranks = false;
  bool idle() const { return outcome == Outcome::kApplied && !updated; }  // no tensor had a gradient
};

// Whether a step that closed for this reason lacked a rank, or what it would have sent.
inline bool IsTorn(const std::string& reason) {
  return reason == "restarted" || reason == "rank_lost" || reason == "timeout" || reason == "data_loss";
}

// Whom a daemon tells what reaches a rank.
class PartsListener {
 public:
  virtual ~PartsListener() = default;
  virtual void OnOpened(uint32_t part, uint32_t rank) = 0;
  virtual void OnEnded(uint32_t part, uint32_t rank, const absl::Status& status) = 0;
  virtual void OnMeasured(uint32_t part, uint32_t rank, const MeasuredStep& measured) = 0;
  virtual void OnResult(uint32_t part, uint32_t rank, const ClosedPart& closed) = 0;
  virtual void OnBegun(uint32_t part, uint32_t rank, uint64_t step) = 0;
  virtual void Count(PartsKind kind) = 0;
};

class PartDaemon final : public SimulatedDaemon {
 public:
  struct Storage {
    bool journal = false;
    uint64_t checkpoint_every = 1, snapshot_every = 1;
    size_t checkpoints = 2, snapshots = 2;  // that are kept
  };
  struct Identity {
    uint32_t part = 0, world = 1;
    uint64_t seed = 0;
    bool judges_by_its_own = false;
    Storage storage = {};
  };
  struct Answer {
    absl::Status status = {};
    double retry_after_s = 0;
    uint64_t resume_step = 0;
    std::optional<ClosedPart> last = {};
  };

  PartDaemon(Options options, Identity identity, Timeline* timeline, PartsListener* listener);

  // --- what a rank's client does
  Answer Attach(uint32_t rank, bool takeover, uint64_t from_step, uint64_t again_step);
  SimulatedRank* client(uint32_t rank) { return places_[rank].client.get(); }
  void Send(uint32_t rank) { Pump(rank); }
  // The client leaves: cleanly, where it has no step open.
  void Leave(uint32_t rank);
  // The process is gone. `flying`: what it has sent still comes.
  void Abandon(uint32_t rank, bool flying);
  uint64_t closed_step() const { return machine().step() - 1; }
  std::set<uint64_t> kept() const;  // steps whose state it has
  // Rewind or Restore. False: a step is being judged; ask again.
  bool GoBack(uint64_t step);
  std::vector<double> Squares() const;  // what the open step measures, by tensor

  // --- faults
  void Cut(uint32_t rank, double away_s);
  void Silence(uint32_t rank, bool to_client);
  void Die();
  bool MayDie() const { return up_ && (identity_.storage.journal ? closed_step() > 1 : !checkpoints_.empty()); }
  bool up() const { return up_; }
  // How often it was taken back, or came back.
  uint64_t returns() const { return returns_; }

  void Tick();
  void TakeWhatWaits() { TakeParked(); }
  void FailBy(const std::string& what) { Fail(what); }

 private:
  void NoteAttach(const StepEffects& effects, uint64_t from_step);
  void Grant(uint32_t rank, SessionId session);
  void Return(uint32_t rank, uint64_t process);
  void ComeBack(uint64_t step);
  void TakeBackTo(uint64_t step);
  void Keep(uint64_t step);
  void OnEnded(uint32_t rank, uint64_t epoch, const absl::Status& status) override;
  void OnResult(uint32_t rank, uint64_t step, SimulatedRank* client) override;
  event::Verdict VerdictOf(uint64_t step) override;
  void OnClosed(const effect::Close& e) override;
  void OnTaken(uint32_t rank, const StepEvent& event) override;
  void Tell(const effect::Measured& e) override;

  const Identity identity_;
  PartsListener& listener_;
  bool up_ = true;
  uint64_t returns_ = 0, era_ = 0, taken_back_ = 0;
  std::set<SessionId> sessions_;                // granted in this life
  std::map<uint64_t, ClosedPart> closed_;       // by step
  std::map<uint32_t, SessionId> asked_;         // by rank: those that measure the open step
  std::optional<Outcome> judged_;               // of the open step
  std::set<uint64_t> checkpoints_, snapshots_;  // of steps
  uint64_t floor_ = 0;                          // the step that it was last taken back to
};

}  // namespace ballast::sim
