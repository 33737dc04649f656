// A rank of a run on several daemons: a process with a trainer in it, whose client is a model of PartsClient. It says
// what that says, in the same order, and does the same about what it is told.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/cpp/parts/part_placement.h"
#include "tests/server/step/parts_simulator_daemon.h"
#include "tests/server/step/parts_simulator_ledger.h"

namespace ballast::sim {

// What the ranks know, and whom they speak to.
struct PartsWorld {
  uint64_t seed = 0;
  Planted planted = Planted::kNothing;
  bool staged = false, rewinds_torn = false;
  PartPlacement placement = {};
  std::vector<std::string> tensor_names = {}, daemon_names = {};
  Timeline* timeline = nullptr;
  PartsLedger* ledger = nullptr;
  PartsListener* listener = nullptr;  // for what it counts
  std::vector<std::unique_ptr<PartDaemon>> daemons = {};
  bool over = false;  // there is no step that all have: the run has ended
  uint32_t parts() const { return static_cast<uint32_t>(daemons.size()); }
};

class PartsRank {
 public:
  PartsRank(PartsWorld* world, uint32_t rank) : world_(*world), rank_(rank) {}

  // A new process comes up, in place of any that was there. `flying`: what that one has sent still comes.
  void Start(double delay_s, bool takeover, bool flying = false);
  void DisagreeNext() { disagrees_ = true; }
  bool alive() const { return life_ != 0; }
  uint64_t made() const { return made_; }                            // the last step whose result it has
  const std::vector<uint64_t>& returns() const { return returns_; }  // by part, when it attached

  void OnOpened(uint32_t part);
  void OnEnded(uint32_t part, const absl::Status& status);
  void OnMeasured(uint32_t part, const MeasuredStep& measured);
  void OnResult(uint32_t part, const ClosedPart& closed);

 private:
  enum class Phase { kDown, kAttaching, kAligning, kBetween, kStepping };
  struct Step {
    bool ended = false;  // the client has sent StepEnd, or will by itself
    std::vector<std::optional<MeasuredStep>> measures;
    std::vector<std::optional<ClosedPart>> results;
  };

  uint32_t parts() const { return world_.parts(); }
  PartDaemon& daemon(uint32_t part) { return *world_.daemons[part]; }
  double Delay(double most_s) { return world_.timeline->Delay(most_s); }
  Random* random() { return &world_.timeline->random; }
  // Does it then, unless the process or its round of attaching is another by then.
  void After(double delay_s, std::function<void()> run);
  void Crash() { Start(Delay(1), Chance(random(), 2)); }

  // --- attaching
  std::optional<uint64_t> RewoundStep() const;
  // As the trainer does after a rewind that the client itself has seen.
  void AttachAfter(uint64_t rewound_to);
  void Attach();
  void AttachAll();
  void NextRound();
  void AskPart(uint32_t part, uint64_t from_step);
  void CloseBesides(uint64_t step);
  void AskAgain(uint32_t part, uint64_t from_step);
  void OnAnswer(uint32_t part, const PartDaemon::Answer& answer);
  void OnRefused(uint32_t part, uint64_t from_step, const PartDaemon::Answer& answer);
  void AlignIfAllOpen();
  void Align(uint64_t first, uint64_t last);
  void CloseBehind(uint64_t last);
  void GoBackIfTorn(uint64_t step);
  void AwaitAligned();
  void OnAttached();
  // `then`: with whether it was done.
  void GoBack(uint64_t at_most, std::function<void(bool)> then);
  void GoBackPart(uint32_t part, uint64_t step, std::function<void(bool)> then);

  // --- steps
  void BeginStep();
  void Discard();
  void EndIfMeasured();
  void SendEnds(const std::string& content, bool discard);
  v1::WholeMeasure Merge();
  void EndIfClosed();
  void OnWhole(const v1::StepResult& whole);
  v1::StepResult MergedResult(const std::vector<ClosedPart>& closed);

  PartsWorld& world_;
  const uint32_t rank_;
  uint64_t life_ = 0;
  Phase phase_ = Phase::kDown;
  bool takeover_ = false, disagrees_ = false;
  std::vector<bool> held_;  // by part: a session of this process holds the rank there
  std::vector<std::optional<PartDaemon::Answer>> answers_;
  std::vector<bool> open_;  // by part
  // Since it began to attach: the steps that it was told the run was taken back to, by each part, and by what it saw itself.
  std::vector<std::optional<uint64_t>> rewound_to_;
  uint64_t again_step_ = 0;  // of the present round
  bool apart_ = false;       // the parts are at steps further apart than one
  int round_ = 0;
  std::vector<uint64_t> returns_;
  Step step_;
  uint64_t made_ = 0;
};

}  // namespace ballast::sim
