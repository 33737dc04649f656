// What deciding costs: whole steps of a StepMachine that is handed every event of so many trainers. Nothing is sent, held
// or summed; what is left is the daemon's strand. growth.py asks it.
//
//   step_machine_bench RANKS TENSORS MICROS ROOM [STEPS]
//   < EVENTS EFFECTS SECONDS TRACKER_WORK MACHINE_BYTES ACCOUNT_BYTES
//
// MICROS: micro-batches a step. ROOM: the share of all slabs that their pool has room for; 1, unless MICROS is 1. STEPS: 1
// unless given, after none that does not count.
//
// All ranks send their gradients in one order, in turns of 1 to 64, and hold at most kCredit that are not summed; beyond
// that each sends what is wanted. The device answers in order, kUnderWay updates late. EVENTS went in and EFFECTS came out in
// SECONDS. TRACKER_WORK: chunks, ranks and sets that the accounts looked at. MACHINE_BYTES: by which the process grew while
// the machine was made and used, without what this program keeps; ACCOUNT_BYTES: ReductionTracker::BytesAtMost, which the
// daemon's memory plan counts on.
#include <malloc.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <optional>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "server/step/step_machine.h"

namespace ballast::bench {
namespace {

constexpr uint64_t kSlab = 4096, kCredit = 4096;
constexpr size_t kUnderWay = 32;

struct Case {
  uint32_t ranks = 1, tensors = 1, micros = 1;
  double room = 1;
  uint32_t steps = 1;
};

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "step_machine_bench: %s\n", what.c_str());
  std::exit(1);
}

uint64_t HeapBytes() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

StepMachineOptions OptionsOf(const Case& wanted) {
  StepMachineOptions options;
  for (uint32_t i = 0; i < wanted.tensors; ++i) options.tensor_names.push_back(absl::StrCat("t", i));
  options.reduction.chunks.assign(wanted.tensors, 1);
  options.reduction.slab_bytes.assign(wanted.tensors, kSlab);
  options.reduction.pool_of.assign(wanted.tensors, 0);
  const auto room = static_cast<uint64_t>(wanted.room * wanted.tensors);
  options.reduction.pool_bytes = {std::max<uint64_t>(room, 1) * kSlab};
  options.reduction.micros = options.most_micros = wanted.micros;
  return options;
}

// The trainers and the device.
class World {
 public:
  explicit World(const Case& wanted) : case_(wanted), trainers_(wanted.ranks) {
    for (Trainer& trainer : trainers_) trainer.sent.resize(wanted.tensors);
    empty_ = HeapBytes();
    machine_.emplace(OptionsOf(wanted));
    for (uint32_t rank = 0; rank < wanted.ranks; ++rank) {
      Handle(event::Attach{.session = SessionOf(rank), .rank = rank, .world = wanted.ranks});
      Handle(event::StreamOpened{.session = SessionOf(rank)});
    }
  }

  void Step() {
    const uint64_t step = machine_->step();
    for (uint32_t rank = 0; rank < case_.ranks; ++rank) {
      trainers_[rank].micro = trainers_[rank].next = 0;
      trainers_[rank].ended = false;
      Handle(event::StepBegin{.session = SessionOf(rank), .step = step});
    }
    while (machine_->step() == step) {
      bool went = false;
      for (uint32_t rank = 0; rank < case_.ranks; ++rank) went = TakeTurn(rank) || went;
      if (!went && !Answer()) Die("nothing is under way, and the step is open");
    }
    while (Answer()) {
    }
    if (updates_ != case_.tensors * step) Die("a step has closed without an update of each tensor");
  }

  void Report(double seconds) const {
    const uint64_t accounts = ReductionTracker::BytesAtMost(
        {.ranks = case_.ranks, .micros = case_.micros, .tensors = case_.tensors, .chunks = case_.tensors});
    std::printf("%lu %lu %.6f %lu %lu %lu\n", events_, effects_, seconds, machine_->reduction().work(),
                HeapBytes() - empty_, accounts);
  }

 private:
  struct Trainer {
    uint32_t micro = 0, next = 0;  // the tensor that is next
    bool begun = false, ended = false;
    uint64_t held = 0;
    std::vector<bool> sent;  // beyond credit, ahead of its turn
  };

  static SessionId SessionOf(uint32_t rank) { return SessionId{rank + 1}; }

  void Handle(const StepEvent& event) {
    ++events_;
    const StepEffects effects = machine_->Handle(event, static_cast<double>(events_) * 1e-6);
    effects_ += effects.size();
    for (const StepEffect& effect : effects) Carry(effect);
  }

  void Carry(const StepEffect& effect) {
    if (const auto* refused = std::get_if<effect::Reject>(&effect)) Die(refused->status.ToString());
    if (const auto* close = std::get_if<effect::Close>(&effect);
        close != nullptr && close->outcome != Outcome::kApplied) {
      Die("a step was not applied");
    }
    if (const auto* held = std::get_if<effect::Hold>(&effect)) ++trainers_[held->rank].held;
    if (const auto* sum = std::get_if<effect::Sum>(&effect)) {
      for (const uint32_t rank : sum->ranks) --trainers_[rank].held;
    }
    if (const auto* update = std::get_if<effect::Update>(&effect)) {
      ++updates_;
      under_way_.push_back(*update);
      if (under_way_.size() > kUnderWay) Answer();
    }
  }

  bool Answer() {
    if (under_way_.empty()) return false;
    const effect::Update update = under_way_.front();
    under_way_.pop_front();
    Handle(event::TensorApplied{update.step, update.tensor, update.slab});
    return true;
  }

  // False: the rank can do nothing now.
  bool TakeTurn(uint32_t rank) {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    const uint64_t most = 1 + (random_ >> 58);
    bool went = false;
    for (uint64_t i = 0; i < most && Go(rank); ++i) went = true;
    return went;
  }

  bool Go(uint32_t rank) {
    Trainer& trainer = trainers_[rank];
    if (trainer.ended) return false;
    if (!trainer.begun) return Begin(rank);
    while (trainer.next < case_.tensors && trainer.sent[trainer.next]) trainer.sent[trainer.next++] = false;
    if (trainer.next == case_.tensors) return End(rank);
    const bool short_of_credit = trainer.held >= kCredit;
    const auto offered = machine_->Offer(rank, short_of_credit);
    if (short_of_credit && !offered) return false;
    const uint32_t tensor = offered ? offered->tensor : trainer.next;
    trainer.sent[tensor] = true;
    Handle(event::Chunk{.session = SessionOf(rank), .micro = trainer.micro, .tensor = tensor});
    return true;
  }

  bool Begin(uint32_t rank) {
    Trainer& trainer = trainers_[rank];
    const event::MicroBegin begin{SessionOf(rank), trainer.micro, trainer.micro + 1 == case_.micros};
    if (machine_->MustWait(begin)) return false;
    Handle(begin);
    return trainer.begun = true;
  }

  bool End(uint32_t rank) {
    Trainer& trainer = trainers_[rank];
    Handle(event::MicroEnd{.session = SessionOf(rank), .micro = trainer.micro, .absent = {}});
    trainer.next = 0;
    trainer.begun = false;
    trainer.ended = ++trainer.micro == case_.micros;
    if (trainer.ended) Handle(event::StepEnd{.session = SessionOf(rank)});
    return true;
  }

  const Case case_;
  std::vector<Trainer> trainers_;
  std::optional<StepMachine> machine_;
  std::deque<effect::Update> under_way_;
  uint64_t random_ = 1, events_ = 0, effects_ = 0, updates_ = 0, empty_ = 0;
};

template <typename T>
T Parse(const char* text) {
  T value;
  bool parsed = false;
  if constexpr (std::is_floating_point_v<T>) {
    parsed = absl::SimpleAtod(text, &value) && value > 0 && value <= 1;
  } else {
    parsed = absl::SimpleAtoi(text, &value) && value > 0;
  }
  if (!parsed) Die(absl::StrCat("'", text, "' is no number that it takes"));
  return value;
}

int Main(int argc, char** argv) {
  if (argc != 5 && argc != 6) Die("usage: step_machine_bench RANKS TENSORS MICROS ROOM [STEPS]");
  Case wanted{Parse<uint32_t>(argv[1]), Parse<uint32_t>(argv[2]), Parse<uint32_t>(argv[3]), Parse<double>(argv[4])};
  if (argc == 6) wanted.steps = Parse<uint32_t>(argv[5]);
  if (wanted.room < 1 && wanted.micros > 1) Die("a step of several micro-batches needs room for all");
  World world(wanted);
  const auto began = std::chrono::steady_clock::now();
  for (uint32_t i = 0; i < wanted.steps; ++i) world.Step();
  world.Report(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  return 0;
}

}  // namespace
}  // namespace ballast::bench

int main(int argc, char** argv) { return ballast::bench::Main(argc, argv); }
