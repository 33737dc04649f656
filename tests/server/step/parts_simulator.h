// A run on several daemons, all drawn from one seed: 1 to 4 step machines, each of which owns a part of the run, and 1 to
// 8 ranks that speak to all of them as PartsClient does. Connections to single parts break, in one direction or in both;
// ranks' processes and daemons die and come back, a daemon perhaps at an earlier step; single parts are rewound. Each
// part's checker looks at every event, and the ledger at what the parts make of a step together.
//
// The rules themselves are the client's: its placement, its merging of measures and results, and its choice of how
// daemons at different steps come together (client/cpp/parts). What it says to whom, and when, is modelled.
//
// Faults come only in the first part of a run. In the second part the run must make steps.
#pragma once

#include <array>
#include <iosfwd>
#include <string>
#include <vector>

#include "tests/server/step/step_simulator_mutants.h"

namespace ballast::sim {

enum class PartsKind {
  kParts,
  kResult,
  kStagedApplied,
  kStagedSkipped,
  kAborted,
  kReleasePartial,
  kStagedTorn,
  kCut,
  kDeaf,
  kMute,
  kDeath,
  kAllDeaths,
  kTimeout,
  kDaemonDeath,
  kOlderStep,
  kPartRewound,
  kFromStep,
  kBegunAgain,
  kClosedBesides,
  kGoBack,
  kAwaitAligned,
  kDiscard,
  kVerdictByOthers,
  kNoCommonStep,
  kCount
};
const char* PartsKindName(PartsKind kind);
using PartsCounts = std::array<uint64_t, static_cast<size_t>(PartsKind::kCount)>;

// What a client, or a daemon around its step machine, may do wrong.
enum class Planted {
  kNothing,
  kJudgesByItsOwn,        // a part judges by what it measures itself
  kBeginsEarly,           // a client begins the next step when the first part has answered
  kCommitsWhatIsOver,     // a client brings a verdict although a part has said that the step is discarded or closed
  kGoesBackToAny,         // a client takes the run back to a step that not all parts have
  kAddsUpByPart,          // a client adds the squares up part by part
  kForgetsFromStep,       // a client does not tell a part that is behind where the run is
  kWaitsForAPart,         // nor one that has open what another part finishes without it
  kTakesPartialForOthers  // a client takes a torn step's result from its first part
};

struct PartsOptions {
  uint64_t seed = 0;
  Planted planted = Planted::kNothing;
  MakeMachine make = MakePlain;
  std::ostream* listing = nullptr;  // every event with its effects
};

struct PartsReport {
  std::string violation;  // empty: none
  uint64_t events = 0;
  PartsCounts counts = {};
};

PartsReport SimulateParts(const PartsOptions& options);

struct PartsMutant {
  std::string name;
  Planted planted = Planted::kNothing;
  MakeMachine make = MakePlain;
  std::string noticed;  // what the violation says
};
std::vector<PartsMutant> PartsMutants();

}  // namespace ballast::sim
