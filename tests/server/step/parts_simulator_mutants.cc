// Faults of the parts that the simulator must notice: in the step machine, in what is around it, in the client.
#include <utility>

#include "tests/server/step/parts_simulator.h"

namespace ballast::sim {
namespace {

// Does not know that there are other parts.
class KnowsNoOthers : public MachineUnderTest {
 public:
  explicit KnowsNoOthers(StepMachineOptions options) : MachineUnderTest(Alone(std::move(options))) {}

 private:
  static StepMachineOptions Alone(StepMachineOptions options) {
    options.is_part = false;
    return options;
  }
};

// Closes whatever step is next for a rank that is past an earlier one.
class ClosesBehindAgain : public MachineUnderTest {
 public:
  using MachineUnderTest::MachineUnderTest;
  StepEffects Handle(const StepEvent& event, double now_s) override {
    const auto* attach = std::get_if<event::Attach>(&event);
    if (attach == nullptr || attach->from_step == 0) return MachineUnderTest::Handle(event, now_s);
    event::Attach altered = *attach;
    altered.from_step = machine().step() + 1;
    return MachineUnderTest::Handle(altered, now_s);
  }
};

// Lets go of a step that is made again although tensors have been updated in it.
class DiscardsWhatIsUpdated : public MachineUnderTest {
 public:
  using MachineUnderTest::MachineUnderTest;
  StepEffects Handle(const StepEvent& event, double now_s) override {
    const auto* attach = std::get_if<event::Attach>(&event);
    const uint64_t step = machine().step();
    const bool updated = machine().step_open() && machine().UpdatedAny();
    StepEffects effects = MachineUnderTest::Handle(event, now_s);
    if (updated && attach != nullptr && attach->again_step == step) {
      effects.insert(effects.begin(), effect::Discard{step});
    }
    return effects;
  }
};

// Forgets, when one stream takes another's place, that the rank has measured the step: it must ask again by itself.
class LosesAnswers : public MachineUnderTest {
 public:
  using MachineUnderTest::MachineUnderTest;
  StepEffects Handle(const StepEvent& event, double now_s) override {
    StepEffects effects = MachineUnderTest::Handle(event, now_s);
    EraseIf(&effects, [](const StepEffect& e) { return std::holds_alternative<effect::Measured>(e); });
    return effects;
  }
};

template <class M>
MakeMachine Of() {
  return [](StepMachineOptions options) { return std::make_unique<M>(std::move(options)); };
}

}  // namespace

std::vector<PartsMutant> PartsMutants() {
  return {
      {.name = "JudgesByItsOwnMeasure", .planted = Planted::kJudgesByItsOwn, .noticed = "judge step"},
      {.name = "BeginsBeforeAllHaveAnswered",
       .planted = Planted::kBeginsEarly,
       .noticed = "has not closed the one before"},
      {.name = "CommitsWhatAPartSaysIsOver",
       .planted = Planted::kCommitsWhatIsOver,
       .noticed = "a rank was there to bring"},
      {.name = "GoesBackToAStepThatNotAllHave", .planted = Planted::kGoesBackToAny, .noticed = "does not have"},
      {.name = "AddsUpByPart", .planted = Planted::kAddsUpByPart, .noticed = "adds up to a norm"},
      {.name = "ForgetsFromStep", .planted = Planted::kForgetsFromStep, .noticed = "make no steps any more"},
      {.name = "WaitsForAPartThatWaitsForIt", .planted = Planted::kWaitsForAPart, .noticed = "make no steps any more"},
      {.name = "TakesTornStepsForWhole",
       .planted = Planted::kTakesPartialForOthers,
       .noticed = "is torn, and a rank is told that it is not"},
      {.name = "AbortsWhatOthersBring", .make = Of<KnowsNoOthers>(), .noticed = "a rank was there to bring"},
      {.name = "ClosesBehindAgain", .make = Of<ClosesBehindAgain>(), .noticed = "closed another step"},
      {.name = "DiscardsWhatIsUpdated",
       .make = Of<DiscardsWhatIsUpdated>(),
       .noticed = "discarded a step with updates"},
      {.name = "LosesWhatItMeasures", .make = Of<LosesAnswers>(), .noticed = "is not told the norm"}};
}

}  // namespace ballast::sim
