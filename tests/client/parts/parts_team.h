// Ranks that train a run of a dozen tensors with gradients that are drawn, for the tests of runs on several daemons: the
// same on one daemon and on several, and all that they see, to compare.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"

#include "client/cpp/client.h"
#include "tests/client/real_daemon.h"
#include "tests/normals.h"

namespace ballast {

// Several daemons, and one beside them that is alone.
class Daemons {
 public:
  explicit Daemons(size_t count, const Config& config = RealDaemon::Small()) {
    for (size_t i = 0; i < count; ++i) daemons_.push_back(std::make_unique<RealDaemon>(config));
  }
  std::string addresses() const {
    std::string all;
    for (const auto& daemon : daemons_) absl::StrAppend(&all, all.empty() ? "" : ",", daemon->address());
    return all;
  }
  RealDaemon& operator[](size_t i) const { return *daemons_[i]; }

 private:
  std::vector<std::unique_ptr<RealDaemon>> daemons_;
};

inline std::unique_ptr<Client> OpenClient(const std::string& server) {
  auto client = Client::Connect({.server = server, .log = [](const std::string&) {}});
  EXPECT_TRUE(client.ok()) << client.status();
  return client.ok() ? *std::move(client) : nullptr;
}

struct Training {
  v1::RunSpec spec;
  uint32_t world = 1;
  uint32_t micros = 1;
  int steps = 6;
  TransportChoice transport = TransportChoice::kAuto;
  // By step: tensors without a gradient; where a gradient is NaN; and what ranks do about the step's end.
  std::map<int, std::vector<uint32_t>> absent = {};
  std::map<int, uint32_t> nan = {};
  std::map<int, StepEndValues> ends = {};
  bool measures = false;  // before the end
};

// What a rank has seen, and what the run is in the end.
struct SeenSteps {
  std::vector<std::string> results;          // of each step, as text without times
  std::vector<double> norms;                 // that MeasureStep answered
  std::map<uint32_t, std::string> weights;   // bound, as they were written
  std::map<std::string, std::string> state;  // of rank 0: pulled in the end, by tensor and slot
};

inline v1::RunSpec DozenTensors() {
  v1::RunSpec spec;
  spec.set_run_id("dozen");
  spec.set_seed(5);
  const std::vector<std::vector<int64_t>> shapes = {{70, 130}, {130}, {64, 96}, {96}, {40, 40}, {9000},
                                                    {3, 5, 7}, {1},   {48, 64}, {64}, {33},     {20, 20}};
  for (size_t i = 0; i < shapes.size(); ++i) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(absl::StrCat("block", i / 3, ".w", i));
    tensor->set_dtype("fp32");
    tensor->mutable_shape()->Add(shapes[i].begin(), shapes[i].end());
  }
  spec.add_groups()->set_rule("adamw");
  return spec;
}

class PartsRank {
 public:
  PartsRank(const std::string& server, const Training& training, uint32_t rank)
      : training_(training), rank_(rank), client_(OpenClient(server)) {}

  Client& client() { return *client_; }

  absl::StatusOr<Attachment> Attach(bool takeover = false) {
    auto attachment = client_->Attach({.run_id = training_.spec.run_id(),
                                       .rank = rank_,
                                       .world = training_.world,
                                       .takeover = takeover,
                                       .transport = training_.transport});
    if (!attachment.ok()) return attachment;
    if (!attachment->weights_loaded && rank_ == 0) {
      if (auto s = Load(); !s.ok()) return s;
    }
    for (uint32_t i = 0; i < Tensors(); ++i) {
      std::string& weights = seen_.weights[i];
      weights.resize(Elements(i) * ServedBytes());
      if (auto s = client_->BindWeights(i, weights.data(), weights.size()); !s.ok()) return s;
    }
    return attachment;
  }

  absl::Status Join() {
    if (auto created = client_->CreateRun(training_.spec); !created.ok()) return created.status();
    return Attach().status();
  }

  absl::StatusOr<StepResult> Step(int number) {
    if (auto s = client_->BeginStep({.groups = {{.lr = 0.01}}, .micro_batches = training_.micros}); !s.ok()) return s;
    for (uint32_t micro = 0; micro < training_.micros; ++micro) {
      for (uint32_t i = Tensors(); i-- > 0;) {
        if (auto s = PushOne(number, micro, i); !s.ok()) return s;
      }
      if (micro + 1 == training_.micros) break;
      if (auto s = client_->EndMicro(1.0 / number); !s.ok()) return s;
    }
    if (training_.measures) {
      const auto measured = client_->MeasureStep(1.0 / number).get();
      if (!measured.ok()) return measured.status();
      seen_.norms.push_back(measured->grad_norm);
    }
    StepEndValues end;
    if (const auto given = training_.ends.find(number); given != training_.ends.end()) end = given->second;
    if (end.client_state.empty()) end.client_state = absl::StrCat("rank ", rank_, " step ", number);
    return client_->EndStep(1.0 / number, end).get();
  }

  void Train(int first, int last) {
    for (int number = first; number <= last; ++number) {
      const auto result = Step(number);
      ASSERT_TRUE(result.ok()) << "rank " << rank_ << " step " << number << ": " << result.status();
      Note(*result);
    }
  }

  void Note(const StepResult& result) {
    v1::StepResult told = result.result;
    if (training_.spec.commit() != v1::COMMIT_MODE_STAGED) {
      // Added up by parts: the last bit may differ.
      told.set_grad_norm(static_cast<double>(static_cast<float>(told.grad_norm())));
    }
    told.clear_durable_step();
    told.clear_warnings();
    std::string text = told.DebugString();
    for (const uint32_t tensor : result.received) absl::StrAppend(&text, " ", tensor);
    seen_.results.push_back(text);
  }

  void PullState() {
    const std::vector<std::string> slots = {"master", "momentum", "variance", "updates"};
    const auto sink = [&](const ServedPiece& piece) {
      std::string& slot = seen_.state[absl::StrCat(piece.tensor, " ", piece.slot)];
      if (piece.slot == "updates") slot = absl::StrCat(piece.updates);
      slot.append(reinterpret_cast<const char*>(piece.codes.data()), piece.codes.size());
      return absl::OkStatus();
    };
    EXPECT_EQ(client_->PullState(training_.spec.run_id(), {}, slots, sink), absl::OkStatus());
  }

  const SeenSteps& seen() const { return seen_; }

 private:
  uint32_t Tensors() const { return static_cast<uint32_t>(training_.spec.tensors_size()); }
  size_t Elements(uint32_t tensor) const {
    size_t elements = 1;
    for (const int64_t size : training_.spec.tensors(static_cast<int>(tensor)).shape()) {
      elements *= static_cast<size_t>(size);
    }
    return elements;
  }
  size_t ServedBytes() const {
    const std::string& serving = training_.spec.groups(0).serving();
    return serving == "bf16" || serving == "fp16" ? 2 : 4;
  }

  std::vector<float> Draw(uint32_t seed, uint32_t tensor, float scale) const {
    return testing::NormalValues(seed, scale, Elements(tensor));
  }
  static absl::Span<const std::byte> Bytes(const std::vector<float>& values) {
    return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(float)};
  }

  absl::Status Load() {
    std::vector<std::vector<float>> values;
    for (uint32_t i = 0; i < Tensors(); ++i) values.push_back(Draw(77 + i, i, 0.1f));
    std::vector<TensorView> views;
    for (uint32_t i = 0; i < Tensors(); ++i) {
      views.push_back({.tensor = i, .format = "fp32", .bytes = Bytes(values[i])});
    }
    return client_->LoadWeights(views).status();
  }

  absl::Status PushOne(int number, uint32_t micro, uint32_t tensor) {
    if (const auto absent = training_.absent.find(number); absent != training_.absent.end()) {
      if (std::find(absent->second.begin(), absent->second.end(), tensor) != absent->second.end()) {
        return absl::OkStatus();
      }
    }
    const uint32_t seed = static_cast<uint32_t>(number) * 1000003 + micro * 7919 + tensor * 101 + rank_;
    std::vector<float> gradient = Draw(seed, tensor, 0.3f);
    const auto bad = training_.nan.find(number);
    if (bad != training_.nan.end() && bad->second == tensor && rank_ == 0) gradient[0] = std::nanf("");
    return client_->Push(tensor, Bytes(gradient));
  }

  const Training training_;
  const uint32_t rank_;
  std::unique_ptr<Client> client_;
  SeenSteps seen_;
};

// All ranks, each on a thread of its own from the first step to the last.
inline std::vector<SeenSteps> Train(const std::string& server, const Training& training) {
  std::vector<std::unique_ptr<PartsRank>> ranks;
  for (uint32_t r = 0; r < training.world; ++r) {
    ranks.push_back(std::make_unique<PartsRank>(server, training, r));
    const absl::Status joined = ranks.back()->Join();
    EXPECT_EQ(joined, absl::OkStatus()) << "rank " << r;
    if (!joined.ok()) return {};
  }
  std::vector<std::thread> threads;
  for (auto& rank : ranks) threads.emplace_back([&rank, &training] { rank->Train(1, training.steps); });
  for (std::thread& thread : threads) thread.join();
  ranks[0]->PullState();
  std::vector<SeenSteps> seen;
  for (auto& rank : ranks) seen.push_back(rank->seen());
  return seen;
}

}  // namespace ballast
