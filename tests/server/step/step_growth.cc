#include "tests/server/step/step_growth.h"

#include <chrono>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"

#include "server/step/step_machine.h"

namespace ballast::sim {
namespace {

struct Cost {
  uint64_t up = 0, down = 0;  // messages
  uint64_t events = 0;
  double seconds = 0;
};

// One part with all its ranks, which keep to the protocol and lose nothing.
class GrowingPart {
 public:
  GrowingPart(uint32_t ranks, uint32_t tensors) : ranks_(ranks), tensors_(tensors), machine_(OptionsOf(tensors)) {}

  Cost Attach() {
    cost_ = {};
    for (uint32_t r = 0; r < ranks_; ++r) {
      Handle(event::Attach{.session = SessionId{r + 1}, .rank = r, .world = ranks_});
      Handle(event::StreamOpened{.session = SessionId{r + 1}});
    }
    return cost_;
  }

  Cost Step() {
    cost_ = {};
    const uint64_t step = machine_.step();
    const auto each = [&](const auto& event_of) {
      for (uint32_t r = 0; r < ranks_; ++r) Handle(event_of(SessionId{r + 1}));
    };
    each([&](SessionId s) { return event::StepBegin{s, step, "lr = 1"}; });
    each([&](SessionId s) { return event::MicroBegin{s, 0, true}; });
    for (uint32_t tensor = 0; tensor < tensors_; ++tensor) {
      each([&](SessionId s) { return event::Chunk{.session = s, .tensor = tensor}; });
    }
    each([&](SessionId s) { return event::MicroEnd{s, 0, {}}; });
    each([&](SessionId s) { return event::StepMeasure{s}; });
    Handle(event::Measured{step});
    each([&](SessionId s) { return event::StepEnd{s, "whole"}; });
    Handle(event::Verdict{step});
    for (const effect::Update& update : std::exchange(updates_, {})) {
      Handle(event::TensorApplied{step, update.tensor, update.slab});
    }
    return cost_;
  }

 private:
  static StepMachineOptions OptionsOf(uint32_t tensors) {
    StepMachineOptions options{.commit = Commit::kStaged, .is_part = true};
    for (uint32_t i = 0; i < tensors; ++i) options.tensor_names.push_back(absl::StrFormat("w%u", i));
    options.reduction = {.chunks = std::vector<uint64_t>(tensors, 1),
                         .slab_bytes = std::vector<uint64_t>(tensors, 64),
                         .pool_of = std::vector<uint32_t>(tensors),
                         .pool_bytes = {64 * uint64_t{tensors}}};
    return options;
  }

  void Handle(const StepEvent& event) {
    const auto began = std::chrono::steady_clock::now();
    const StepEffects effects = machine_.Handle(event, 0);
    cost_.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    ++cost_.events;
    const bool device = std::holds_alternative<event::Measured>(event) ||
                        std::holds_alternative<event::Verdict>(event) ||
                        std::holds_alternative<event::TensorApplied>(event);
    cost_.up += device ? 0 : 1;
    for (const StepEffect& effect : effects) {
      if (const auto* update = std::get_if<effect::Update>(&effect)) updates_.push_back(*update);
      if (std::holds_alternative<effect::Publish>(effect)) cost_.down += ranks_;
      if (std::holds_alternative<effect::Sum>(effect)) cost_.down += ranks_;  // credit comes back
      cost_.down += std::holds_alternative<effect::Measured>(effect) ||
                    std::holds_alternative<effect::Result>(effect) || std::holds_alternative<effect::Attached>(effect);
    }
  }

  const uint32_t ranks_, tensors_;
  StepMachine machine_;
  std::vector<effect::Update> updates_;
  Cost cost_;
};

struct Scale {
  uint64_t ranks, parts, tensors, chunks;  // of the whole run
};

void Measure(const Scale& scale, std::ostream& out) {
  constexpr int kSteps = 20;
  Cost attach, step;
  for (uint64_t p = 0; p < scale.parts; ++p) {
    GrowingPart part(static_cast<uint32_t>(scale.ranks), static_cast<uint32_t>(scale.tensors / scale.parts));
    attach.seconds += part.Attach().seconds;
    for (int s = 0; s < kSteps; ++s) {
      const Cost one = part.Step();
      step = {step.up + one.up, step.down + one.down, step.events + one.events, step.seconds + one.seconds};
    }
  }
  const double steps = kSteps, up = static_cast<double>(step.up) / steps, down = static_cast<double>(step.down) / steps;
  const double ranks = static_cast<double>(scale.ranks), parts = static_cast<double>(scale.parts);
  out << absl::StreamFormat(
      "measured: %u ranks, %u parts, %u tensors of a chunk: %.0f messages a step up and %.0f down, %.0f and %.0f a "
      "rank, "
      "%.0f and %.0f a daemon; %.2f us an event, %.1f ms of each daemon a step; %.1f us to attach a rank to a part\n",
      scale.ranks, scale.parts, scale.tensors, up, down, up / ranks, down / ranks, up / parts, down / parts,
      step.seconds / static_cast<double>(step.events) * 1e6, step.seconds / steps / parts * 1e3,
      attach.seconds / ranks / parts * 1e6);
}

// `sharded`: each gradient comes from one rank, and not from every rank.
void Count(const Scale& scale, bool sharded, std::ostream& out) {
  constexpr uint64_t kOfStep = 5, kAnswers = 2;  // StepBegin to StepEnd; StepMeasured and StepResult
  const uint64_t chunks = sharded ? scale.chunks / scale.ranks : scale.chunks;
  const uint64_t of_rank = scale.parts * kOfStep + chunks, of_daemon = scale.ranks * of_rank / scale.parts;
  const ReductionTracker::Size one{.tensors = scale.tensors / scale.parts, .chunks = scale.chunks / scale.parts};
  ReductionTracker::Size all = one;
  all.ranks = scale.ranks;
  all.micros = 2;
  const auto accounts = static_cast<double>(ReductionTracker::BytesAtMost(all));
  out << absl::StreamFormat(
      "counted: %u ranks, %u parts, %u tensors, %u chunks, %s: %u messages a step up a rank, %u a daemon; %u small "
      "ones "
      "down a rank; %.1f MB of measures a step a daemon; %.0f MB of accounts a daemon, %.0f KB a rank; %u calls of "
      "Attach\n",
      scale.ranks, scale.parts, scale.tensors, scale.chunks, sharded ? "sharded" : "whole gradients", of_rank,
      of_daemon, scale.parts * kAnswers, static_cast<double>(8 * scale.tensors / scale.parts * scale.ranks) / 1e6,
      accounts / 1e6, accounts / static_cast<double>(scale.ranks) / 1e3, scale.ranks * scale.parts);
}

}  // namespace

void PrintGrowth(std::ostream& out) {
  for (const uint64_t ranks : {8, 64, 256, 1000}) Measure({ranks, 16, 64, 64}, out);
  constexpr uint64_t kParameters = 1'000'000'000'000, kChunk = 262'144;  // elements of 1 MiB
  for (const bool sharded : {false, true}) Count({1000, 100, 10'000, kParameters / kChunk}, sharded, out);
}

}  // namespace ballast::sim
