// Whatever ranks say, in whatever order, the step machine keeps its promises: any bytes are read as a run and as events
// of its ranks' sessions, of the device and of the clock, and the simulator's checker looks at each. Ranks need not
// keep to the protocol: micro-batches out of order, chunks of steps long closed, a session that was fenced. Only what
// the edge sees to before is kept: indices are of the run, a message comes on a stream that is open, the device answers
// what it was asked.
//
// A libFuzzer target (LLVMFuzzerTestOneInput); random_inputs.cc drives it where there is no clang.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "tests/fuzz/input.h"
#include "tests/server/step/step_simulator_checker.h"
#include "tests/server/step/step_text.h"

namespace ballast::fuzz {
namespace {

constexpr uint32_t kMostRanks = 4;

sim::RunShape ShapeFrom(Input* in) {
  sim::RunShape run;
  run.machine.commit = in->Below(2) == 0 ? Commit::kRelease : Commit::kStaged;
  run.machine.most_micros = 1 + in->Below(3);
  run.machine.lease_s = 2;
  run.machine.rank_timeout_s = 10;
  ReductionTracker::Options& reduction = run.machine.reduction;
  const uint32_t tensors = 1 + in->Below(4), pools = 1 + in->Below(2);
  const bool whole = run.machine.commit == Commit::kStaged || run.machine.most_micros > 1 || in->Below(2) == 0;
  reduction.pool_bytes.resize(pools);
  for (uint32_t i = 0; i < tensors; ++i) {
    run.machine.tensor_names.push_back(absl::StrCat("w", i));
    reduction.chunks.push_back(1 + in->Below(3));
    run.last_chunk_bytes.push_back(sim::kChunkBytes);
    reduction.slab_bytes.push_back((reduction.chunks[i] * sim::kChunkBytes + 63) / 64 * 64);
    reduction.pool_of.push_back(in->Below(pools));
    uint64_t& pool = reduction.pool_bytes[reduction.pool_of[i]];
    pool = whole ? pool + reduction.slab_bytes[i] : std::max(pool, reduction.slab_bytes[i]);
  }
  run.window_bytes = 1 << 20;
  return run;
}

class Session {
 public:
  // `tell`: every event with its effects, to stderr.
  Session(Input in, bool tell)
      : in_(in), tell_(tell), shape_(ShapeFrom(&in_)), machine_(shape_.machine), checker_(shape_, sim::Peers::kAny) {
    world_ = 1 + in_.Below(kMostRanks);
  }

  // What was violated first; empty: nothing.
  std::string Run() {
    while (in_.left() > 0 && violation_.empty()) Act();
    return violation_;
  }

 private:
  struct Stream {
    SessionId session = {};
    bool open = false;
  };

  // One byte says who and what; its arguments follow.
  void Act() {
    const uint8_t byte = in_.Take<uint8_t>();
    const uint32_t rank = byte / 16 % world_;
    if (byte % 16 < 3) return Connect(rank, byte % 16);
    if (byte % 16 > 11) return Elsewhere(byte % 16);
    Stream& stream = streams_[rank];
    if (!stream.open) return;
    const StepEffects effects = Handle(Speak(rank, byte % 16));
    const bool refused = !effects.empty() && std::holds_alternative<effect::Reject>(effects.front());
    if (refused) Close(&stream, /*clean=*/false);
  }

  void Connect(uint32_t rank, uint32_t what) {
    Stream& stream = streams_[rank];
    const uint8_t how = in_.Take<uint8_t>();
    if (what == 0) {
      if (how % 8 == 7 && machine_.world() != 0) world_ = 1 + how / 8 % kMostRanks;
      event::Attach attach{.session = SessionId{++sessions_}, .takeover = how % 2 == 1, .rank = rank % world_};
      attach.world = world_;
      Attach(attach);
    } else if (what == 1) {
      Attach({.session = SessionId{++sessions_}, .resumes = stream.session, .rank = rank, .world = machine_.world()});
    } else if (machine_.RankOf(stream.session)) {
      stream.open = true;
      const uint64_t step = machine_.step() - std::min<uint64_t>(machine_.step(), how % 3);
      Handle(event::StreamOpened{stream.session, step, Bits(how / 4)});
    }
  }

  void Attach(const event::Attach& attach) {
    const StepEffects effects = Handle(attach);
    for (const StepEffect& effect : effects) {
      const auto* attached = std::get_if<effect::Attached>(&effect);
      if (attached != nullptr) streams_[attached->rank] = {.session = attached->session};
    }
    if (machine_.world() != 0) world_ = machine_.world();
  }

  StepEvent Speak(uint32_t rank, uint32_t what) {
    const SessionId session = streams_[rank].session;
    const uint32_t tensors = static_cast<uint32_t>(shape_.machine.tensor_names.size());
    switch (what) {
      case 3:
        return event::StepBegin{session, StepFrom(in_.Take<uint8_t>()), "lr"};
      case 4:
        return event::StepBegin{session, machine_.step(), in_.Below(8) == 0 ? "another" : "lr"};
      case 5:
        return event::MicroBegin{session, in_.Below(4), in_.Below(2) == 1};
      case 6:
      case 7:
      case 8: {
        const uint32_t micro = in_.Below(4), tensor = in_.Below(tensors);
        const uint64_t chunk = in_.Below(static_cast<uint32_t>(shape_.machine.reduction.chunks[tensor]));
        const uint32_t other = what == 8 && in_.Below(16) == 0 ? 1 : 0;
        const auto id = static_cast<uint32_t>(session);
        const uint32_t crc = ((id * 64 + micro) * 16 + tensor) * 16 + static_cast<uint32_t>(chunk);
        return event::Chunk{session, micro, tensor, chunk, crc * 2 + other};
      }
      case 9:
      case 10: {
        const uint32_t micro = in_.Below(4);
        return event::MicroEnd{session, micro, Bits(in_.Take<uint8_t>())};
      }
      default:
        return EndFrom(in_.Take<uint8_t>(), session);
    }
  }

  static StepEvent EndFrom(uint8_t byte, SessionId session) {
    if (byte % 4 == 1) return event::StepMeasure{session};
    return event::StepEnd{session, byte % 8 == 7 ? "another" : "", /*discard=*/byte % 16 == 2};
  }

  // Mostly the one that is due.
  uint64_t StepFrom(uint8_t byte) const {
    return byte % 4 == 0 ? machine_.step() + byte / 4 - std::min<uint64_t>(machine_.step(), 30) : machine_.step();
  }

  void Elsewhere(uint32_t what) {
    if (what == 12) {
      Stream& stream = streams_[in_.Below(world_)];
      if (stream.open) Close(&stream, in_.Below(2) == 0);
    } else if (what == 13) {
      now_s_ += 0.1 * in_.Take<uint8_t>();
      Handle(event::Tick{});
    } else if (what == 14 && !updates_.empty()) {
      // The device takes a tensor's updates in turn.
      const uint32_t tensor = updates_[in_.Below(static_cast<uint32_t>(updates_.size()))].tensor;
      const auto first = std::find_if(updates_.begin(), updates_.end(),
                                      [&](const effect::Update& update) { return update.tensor == tensor; });
      const effect::Update update = *first;
      updates_.erase(first);
      Handle(event::TensorApplied{update.step, update.tensor, update.slab});
    } else if (what == 15 && !measured_.empty()) {
      const uint64_t step = measured_.front();
      measured_.pop_front();
      Handle(event::Measured{step});
    } else if (what == 15 && !judged_.empty()) {
      const uint64_t step = judged_.front();
      judged_.pop_front();
      constexpr Outcome kOutcomes[] = {Outcome::kApplied, Outcome::kApplied, Outcome::kSkipped, Outcome::kAborted};
      const Outcome outcome = kOutcomes[in_.Below(4)];
      const std::string reason = outcome == Outcome::kApplied ? "" : "nonfinite";
      Handle(event::Verdict{.step = step, .outcome = outcome, .reason = reason});
    }
  }

  void Close(Stream* stream, bool clean) {
    stream->open = false;
    Handle(event::StreamClosed{stream->session, clean});
  }

  std::vector<bool> Bits(uint32_t byte) const {
    std::vector<bool> bits(shape_.machine.tensor_names.size());
    for (size_t i = 0; i < bits.size(); ++i) bits[i] = (byte >> i & 1) != 0;
    return bits;
  }

  StepEffects Handle(const StepEvent& event) {
    StepEffects effects = machine_.Handle(event, now_s_);
    if (tell_) Tell(event, effects);
    for (const StepEffect& effect : effects) {
      if (const auto* update = std::get_if<effect::Update>(&effect)) updates_.push_back(*update);
      if (const auto* measure = std::get_if<effect::Measure>(&effect)) measured_.push_back(measure->step);
      if (const auto* judge = std::get_if<effect::Judge>(&effect)) judged_.push_back(judge->step);
      if (const auto* fence = std::get_if<effect::Fence>(&effect)) {
        if (streams_[fence->rank].session == fence->session) streams_[fence->rank].open = false;
      }
    }
    if (violation_.empty()) violation_ = checker_.Observe(event, effects, machine_);
    return effects;
  }

  static void Tell(const StepEvent& event, const StepEffects& effects) {
    std::fprintf(stderr, "%s\n", Describe(event).c_str());
    for (const StepEffect& effect : effects) std::fprintf(stderr, "    %s\n", Describe(effect).c_str());
  }

  Input in_;
  const bool tell_;
  const sim::RunShape shape_;
  StepMachine machine_;
  sim::StepChecker checker_;
  uint32_t world_ = 1;
  Stream streams_[kMostRanks];
  uint64_t sessions_ = 0;
  double now_s_ = 0;
  std::vector<effect::Update> updates_;  // that the device has not answered
  std::deque<uint64_t> measured_;        // steps whose measure is due
  std::deque<uint64_t> judged_;          // steps whose verdict is due
  std::string violation_;
};

}  // namespace
}  // namespace ballast::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string violation = ballast::fuzz::Session({data, size}, /*tell=*/false).Run();
  if (violation.empty()) return 0;
  ballast::fuzz::Session({data, size}, /*tell=*/true).Run();
  std::fprintf(stderr, "%s\n", violation.c_str());
  std::abort();
}
