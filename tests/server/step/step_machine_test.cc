// Runs tests/server/step/scenarios/*.txt against the step machine. A scenario is a paragraph of intent, then blocks of
//
//   command key=value...
//   ----
//   the effects, one a line, or nothing
//
// Commands: machine chunks=2,1 lease=10 timeout=60 step_timeout=0 tick=1000 micros=1 pool=CHUNKS staged leaves_out_lost
// goes_on (from the machine before, after a rewind) | attach s= rank= of= resumes= takeover covers=TENSOR.CHUNK,... |
// keep-alive s= | whereabouts (of all ranks) | open s= step= have=0,2 | lost s= | leave s= | begin
// s= step= content= | micro-begin s= micro= last | chunk s= tensor= chunk= crc= micro= | micro-end s= absent=1 micro= |
// step-measure s= | step-end s= content= discard | applied step= tensor= | measured step= | verdict step= skip= abort= |
// rewind to= | tick | wanted rank= | offer rank= short | awaited | at t=SECONDS (sets the clock; no block follows). A
// chunk takes 1 byte of the pool.
#include "server/step/step_machine.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

#include "tests/server/step/chunk_sets.h"
#include "tests/server/step/step_text.h"

namespace ballast {
namespace {

// One command line, taken apart.
struct Command {
  std::string verb;
  std::map<std::string, std::string> values;

  explicit Command(const std::string& line) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    verb = words.at(0);
    for (size_t i = 1; i < words.size(); ++i) {
      const std::pair<std::string, std::string> pair = absl::StrSplit(words[i], absl::MaxSplits('=', 1));
      values[pair.first] = pair.second;
    }
  }
  bool has(const std::string& key) const { return values.count(key) > 0; }
  std::string text(const std::string& key) const { return has(key) ? values.at(key) : ""; }
  uint64_t number(const std::string& key, uint64_t fallback = 0) const {
    uint64_t n = fallback;
    if (has(key) && !absl::SimpleAtoi(values.at(key), &n)) ADD_FAILURE() << "not a number: " << key;
    return n;
  }
  std::vector<uint64_t> numbers(const std::string& key) const {
    std::vector<uint64_t> result;
    for (const auto word : absl::StrSplit(text(key), ',', absl::SkipEmpty())) {
      result.push_back(std::strtoull(std::string(word).c_str(), nullptr, 10));
    }
    return result;
  }
  std::vector<bool> set(const std::string& key) const {
    std::vector<bool> bits;
    for (const uint64_t i : numbers(key)) {
      if (bits.size() <= i) bits.resize(i + 1);
      bits[i] = true;
    }
    return bits;
  }
  // 0.1,1.-: chunk 1 of tensor 0 and none of tensor 1; a tensor that is not named: all.
  ChunkSet chunks(const std::string& key, const std::vector<uint64_t>& of_tensor) const {
    std::vector<std::vector<bool>> set;
    for (const uint64_t chunks : of_tensor) set.emplace_back(chunks, true);
    std::vector<bool> named(of_tensor.size());
    for (const auto word : absl::StrSplit(text(key), ',', absl::SkipEmpty())) {
      const std::pair<std::string, std::string> at = absl::StrSplit(word, '.');
      const size_t tensor = std::strtoull(at.first.c_str(), nullptr, 10);
      if (!named[tensor]) set[tensor].assign(of_tensor[tensor], false);
      named[tensor] = true;
      if (at.second != "-") set[tensor][std::strtoull(at.second.c_str(), nullptr, 10)] = true;
    }
    return testing::ChunkSetOf(set);
  }
  SessionId session() const { return SessionId{number("s", 1)}; }
};

class Scenario {
 public:
  std::string Run(const Command& c) {
    if (c.verb == "machine") return Start(c);
    if (c.verb == "wanted") {
      const auto id = machine_->Wanted(static_cast<uint32_t>(c.number("rank")));
      return id ? Describe(*id) : "nothing";
    }
    if (c.verb == "offer") {
      const auto id = machine_->Offer(static_cast<uint32_t>(c.number("rank")), c.has("short"));
      return id ? Describe(*id) : "nothing";
    }
    std::vector<std::string> lines;
    if (c.verb == "awaited") {
      for (const AwaitedRank& rank : machine_->Awaited()) lines.push_back(Describe(rank));
      return absl::StrJoin(lines, "\n");
    }
    if (c.verb == "whereabouts") return Whereabouts();
    for (const StepEffect& effect : machine_->Handle(Event(c), now_s_)) {
      lines.push_back(Describe(effect));
      if (const auto* u = std::get_if<effect::Update>(&effect)) slabs_[{u->step, u->tensor}] = u->slab;
    }
    return absl::StrJoin(lines, "\n");
  }
  void SetClock(double now_s) { now_s_ = now_s; }

 private:
  std::string Whereabouts() const {
    std::vector<std::string> lines;
    for (uint32_t r = 0; r < machine_->world(); ++r) {
      const auto since_s = machine_->returning_since_s(r, now_s_);
      const std::string where = machine_->held(r, now_s_)   ? "held"
                                : since_s                   ? absl::StrCat("returning since ", *since_s)
                                : machine_->lost(r, now_s_) ? "lost"
                                                            : "free";
      lines.push_back(absl::StrCat("rank ", r, " is ", where));
    }
    return absl::StrJoin(lines, "\n");
  }

  std::string Start(const Command& c) {
    StepMachineOptions options{.tensor_names = {},
                               .reduction = {.chunks = c.numbers("chunks")},
                               .commit = c.has("staged") ? Commit::kStaged : Commit::kRelease,
                               .most_micros = static_cast<uint32_t>(c.number("micros", 1)),
                               .lease_s = static_cast<double>(c.number("lease", 10)),
                               .rank_timeout_s = static_cast<double>(c.number("timeout", 60)),
                               .step_timeout_s = static_cast<double>(c.number("step_timeout")),
                               .counted_tick_s = static_cast<double>(c.number("tick", 1000)),
                               .leaves_out_lost = c.has("leaves_out_lost"),
                               .is_part = c.has("part")};
    ReductionTracker::Options& r = options.reduction;
    chunks_ = r.chunks;
    for (size_t i = 0; i < r.chunks.size(); ++i) options.tensor_names.push_back(absl::StrCat("w", i));
    r.slab_bytes = r.chunks;
    r.pool_of.resize(r.chunks.size());
    r.pool_bytes = {c.number("pool", std::accumulate(r.chunks.begin(), r.chunks.end(), uint64_t{0}))};
    auto machine = std::make_unique<StepMachine>(options);
    if (c.has("goes_on")) machine->GoOnFrom(machine_->past());
    machine_ = std::move(machine);
    return "";
  }

  StepEvent Event(const Command& c) const {
    const SessionId s = c.session();
    const auto micro = static_cast<uint32_t>(c.number("micro"));
    const auto tensor = static_cast<uint32_t>(c.number("tensor"));
    if (c.verb == "attach") {
      event::Attach attach{.session = s,
                           .resumes = std::nullopt,
                           .takeover = c.has("takeover"),
                           .rank = static_cast<uint32_t>(c.number("rank")),
                           .world = static_cast<uint32_t>(c.number("of", 1)),
                           .coverage = {},
                           .from_step = c.number("from"),
                           .again_step = c.number("again")};
      if (c.has("resumes")) attach.resumes = SessionId{c.number("resumes")};
      if (c.has("covers")) attach.coverage.contributes = c.chunks("covers", chunks_);
      return attach;
    }
    if (c.verb == "open") {
      return event::StreamOpened{.session = s, .weights_step = c.number("step"), .weights_received = c.set("have")};
    }
    if (c.verb == "keep-alive") return event::KeepAlive{s};
    if (c.verb == "lost") return event::StreamClosed{.session = s, .clean = false};
    if (c.verb == "leave") return event::StreamClosed{.session = s, .clean = true};
    if (c.verb == "begin")
      return event::StepBegin{.session = s, .step = c.number("step"), .content = c.text("content")};
    if (c.verb == "micro-begin") return event::MicroBegin{.session = s, .micro = micro, .last = c.has("last")};
    if (c.verb == "chunk") {
      return event::Chunk{.session = s,
                          .micro = micro,
                          .tensor = tensor,
                          .chunk = c.number("chunk"),
                          .crc = static_cast<uint32_t>(c.number("crc", 7))};
    }
    if (c.verb == "micro-end") return event::MicroEnd{.session = s, .micro = micro, .absent = c.set("absent")};
    if (c.verb == "step-measure") return event::StepMeasure{.session = s};
    if (c.verb == "step-end") {
      return event::StepEnd{.session = s, .content = c.text("content"), .discard = c.has("discard")};
    }
    if (c.verb == "measured") return event::Measured{.step = c.number("step")};
    if (c.verb == "applied") {
      const uint64_t step = c.number("step");
      return event::TensorApplied{.step = step, .tensor = tensor, .slab = slabs_.at({step, tensor})};
    }
    if (c.verb == "verdict") {
      return event::Verdict{.step = c.number("step"),
                            .outcome = c.has("skip")    ? Outcome::kSkipped
                                       : c.has("abort") ? Outcome::kAborted
                                                        : Outcome::kApplied,
                            .reason = c.text("skip") + c.text("abort")};
    }
    if (c.verb == "rewind") return event::Rewind{.to_step = c.number("to")};
    if (c.verb == "stop") return event::Stop{};
    EXPECT_EQ(c.verb, "tick") << "unknown command";
    return event::Tick{};
  }

  std::unique_ptr<StepMachine> machine_;
  std::vector<uint64_t> chunks_;                         // by tensor
  std::map<std::pair<uint64_t, uint32_t>, Slab> slabs_;  // of updates, by step and tensor
  double now_s_ = 0;
};

std::vector<std::filesystem::path> ScenarioFiles() {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(BALLAST_SCENARIOS)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

class StepScenarioTest : public ::testing::TestWithParam<std::filesystem::path> {};

TEST_P(StepScenarioTest, EffectsAreAsWritten) {
  std::ifstream in(GetParam());
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  Scenario scenario;
  int blocks = 0;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (lines[i].rfind("at t=", 0) == 0) scenario.SetClock(std::stod(lines[i].substr(5)));
    if (i + 1 >= lines.size() || lines[i + 1] != "----") continue;
    SCOPED_TRACE(absl::StrCat(GetParam().filename().string(), ":", i + 1, ": ", lines[i]));
    std::vector<std::string> wanted;
    for (size_t j = i + 2; j < lines.size() && !lines[j].empty(); ++j) wanted.push_back(lines[j]);
    EXPECT_EQ(scenario.Run(Command(lines[i])), absl::StrJoin(wanted, "\n"));
    ++blocks;
  }
  EXPECT_GE(blocks, 5) << "the scenario holds next to nothing";
}

INSTANTIATE_TEST_SUITE_P(All, StepScenarioTest, ::testing::ValuesIn(ScenarioFiles()), [](const auto& param_info) {
  std::string name = param_info.param.stem().string();
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

// However many ranks there are: looking through the gradients of one takes as long as it has tensors.
TEST(StepMachineTest, EachLookAtWhoIsAwaitedIsAtTheGradientsOfOneRank) {
  const std::vector<uint64_t> ones(3, 1);
  StepMachine machine({.tensor_names = {"a", "b", "c"},
                       .reduction = {.chunks = ones, .slab_bytes = ones, .pool_of = {0, 0, 0}, .pool_bytes = {3}}});
  const std::vector<SessionId> ranks = {SessionId{1}, SessionId{2}, SessionId{3}};
  const auto send = [&](uint32_t rank, uint32_t tensor) {
    machine.Handle(event::Chunk{.session = ranks[rank], .tensor = tensor, .chunk = 0, .crc = 5}, 0);
  };
  const auto said = [&] {
    std::vector<std::string> whats;
    for (const AwaitedRank& rank : machine.Awaited()) whats.push_back(rank.what);
    return whats;
  };
  for (uint32_t r = 0; r < 3; ++r) {
    machine.Handle(event::Attach{.session = ranks[r], .rank = r, .world = 3}, 0);
    machine.Handle(event::StreamOpened{.session = ranks[r]}, 0);
    machine.Handle(event::StepBegin{.session = ranks[r], .step = 1}, 0);
  }
  for (uint32_t r = 0; r < 3; ++r) send(r, 0);
  for (const double now_s : {1.0, 2.0, 3.0}) machine.Handle(event::Tick{}, now_s);
  const std::string some = "lacks gradients in micro-batch 0";
  const std::string two = "lacks 2 of 3 tensors in micro-batch 0, the first tensor 1 'b'";
  const std::string one = "lacks 1 of 3 tensors in micro-batch 0, the first tensor 2 'c'";
  EXPECT_EQ(said(), (std::vector<std::string>{two, some, some}));
  EXPECT_EQ(said(), (std::vector<std::string>{two, two, some}));
  for (uint32_t r = 0; r < 3; ++r) send(r, 1);
  EXPECT_EQ(said(), (std::vector<std::string>{two, two, one}));
  EXPECT_EQ(said(), (std::vector<std::string>{one, two, one}));
  EXPECT_EQ(said(), (std::vector<std::string>{one, one, one}));
  EXPECT_EQ(said(), (std::vector<std::string>{one, one, one}));
}

TEST(StepMachineTest, ResumeStateNamesWhatIsHeld) {
  StepMachine machine({.tensor_names = {"a", "b"},
                       .reduction = {.chunks = {2, 1}, .slab_bytes = {2, 1}, .pool_of = {0, 0}, .pool_bytes = {3}}});
  const SessionId s{1};
  machine.Handle(event::Attach{.session = s}, 0);
  machine.Handle(event::StreamOpened{.session = s}, 0);
  machine.Handle(event::StepBegin{.session = s, .step = 1}, 0);
  machine.Handle(event::Chunk{.session = s, .tensor = 0, .chunk = 1, .crc = 5}, 0);
  machine.Handle(event::Chunk{.session = s, .tensor = 1, .chunk = 0, .crc = 6}, 0);
  EXPECT_EQ(machine.reduction().micros_begun(0), 1u);
  EXPECT_EQ(machine.reduction().Delivered(0, 0, 0), (std::vector<bool>{false, true}));
  EXPECT_EQ(machine.reduction().Delivered(0, 0, 1), (std::vector<bool>{true}));
  EXPECT_EQ(machine.TensorsApplied(), (std::vector<bool>{false, true}));
  EXPECT_TRUE(machine.InStep(0));
  EXPECT_EQ(machine.step(), 1u);
}

}  // namespace
}  // namespace ballast
