// Readers of versions over a store on the CPU, which a test changes, and closes steps of, as a run does.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"

#include "server/follow/followers.h"
#include "server/metrics/metrics.h"
#include "tests/server/follow/version_reader.h"
#include "tests/server/store/store_fixture.h"

namespace ballast::testing {

class FollowersTest : public StoreTest {
 protected:
  FollowersTest() : StoreTest(/*threads=*/2) {}

  void Make(const std::string& serving, uint32_t every = 1, uint32_t readers = 9) {
    v1::RunSpec wire = MakeSpec("r1", {{"a", {64, 1000}, "fp32"}, {"b", {300}, "fp32"}, {"c", {9, 4096}, "bf16"}});
    if (!serving.empty()) wire.mutable_groups(0)->set_serving(serving);
    wire.mutable_follow()->set_every(every);
    wire.mutable_follow()->set_readers(readers);
    wire.mutable_follow()->set_tags(most_tags_);
    MakeStore(wire);
    if (is_part_) spec_.part = RunPart{.index = 0, .count = 2};
    if (tags_.fs != nullptr) spec_.checkpoints = CheckpointSettings();
    run_ = metrics_.AddRun({.run_id = "r1", .followed = true});
    MakeFollowers();
  }
  // Also again, as a daemon that is started again does.
  void MakeFollowers() {
    OnStrand([&] {
      followers_ = std::make_unique<Followers>(
          Followers::Environment{.spec = &spec_,
                                 .plan = &plan_,
                                 .chunk_starts = std::make_shared<const std::vector<uint64_t>>(ChunkStarts(spec_)),
                                 .store = store_.get(),
                                 .strand = &strand_,
                                 .metrics = run_.get(),
                                 .show =
                                     [this](const FollowFigures& figures) {
                                       run_->OnFollowers(figures.readers);
                                       absl::MutexLock lock(&mu_);
                                       shown_ = figures;
                                     },
                                 .made = [] {},
                                 .tags = tags_});
      followers_->LoadTags();
      store_->set_before_change([this](uint32_t tensor) { followers_->BeforeChange(tensor); });
    });
  }
  void TearDown() override {
    readers_.clear();
    store_->WaitIdle();
    OnStrand([&] { followers_.reset(); });
    StoreTest::TearDown();
  }

  // `weights`: what the reader has. It takes no message but the first where it is held.
  std::shared_ptr<VersionReader> Follow(FollowOrder order = {}, std::optional<ServedWeights> weights = {},
                                        bool held = false) {
    const auto reader = MakeReader(order, std::move(weights), held);
    OnStrand([&] { followers_->Begin(std::move(order), reader); });
    return reader;
  }
  // One of the order that is begun with it.
  std::shared_ptr<VersionReader> MakeReader(const FollowOrder& order, std::optional<ServedWeights> weights = {},
                                            bool held = false) {
    if (!weights) weights = VersionReader::Blank(spec_);
    auto place = std::make_shared<VersionReader*>(nullptr);
    auto reader = std::make_shared<VersionReader>(&spec_, *weights, order.have, [this, place] {
      strand_.Post([this, place] {
        if (followers_ != nullptr) followers_->OnSent(*place);
      });
    });
    *place = reader.get();
    reader->held = held;
    readers_.push_back(reader);
    return reader;
  }
  // As a closed step does, and the idle time after it.
  bool Close(uint64_t step, uint64_t generation = 1) {
    bool wanted = false;
    OnStrand([&] {
      wanted = followers_->Wants(generation, step);
      if (wanted) followers_->Make(generation, step, 1e9 + static_cast<double>(step));
    });
    return wanted;
  }
  void Encode() {
    OnStrand([&] { EncodeMore(); });
  }
  void EncodeMore() {
    followers_->EncodeNext([this] { EncodeMore(); });
  }
  void AwaitMade(uint64_t step, uint64_t generation = 1) {
    absl::MutexLock lock(&mu_);
    const auto made = [&] {
      return shown_.newest && shown_.newest->step == step && shown_.newest->generation == generation;
    };
    ASSERT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&made), absl::Minutes(1))) << "version " << step;
  }
  // A version of what there is now.
  void Version(uint64_t step, uint64_t generation = 1) {
    ASSERT_TRUE(Close(step, generation));
    Encode();
    AwaitMade(step, generation);
  }
  // What the store serves now.
  ServedWeights Look() {
    ServedWeights weights = VersionReader::Blank(spec_);
    std::deque<WeightPiece> pieces;
    std::vector<std::pair<uint32_t, uint64_t>> places;
    OnStrand([&] {
      for (uint32_t i = 0; i < spec_.tensors.size(); ++i) {
        for (uint64_t c = 0; c < ChunkCount(spec_, spec_.tensors[i]); ++c) {
          places.push_back({i, c});
          pieces.emplace_back();
          store_->EncodeWeights({i, ChunkBegin(spec_, c), ChunkEnd(spec_, spec_.tensors[i], c)}, &pieces.back(),
                                [](const TaskResult&) {});
        }
      }
    });
    store_->WaitIdle();
    for (size_t p = 0; p < places.size(); ++p) {
      const auto [i, c] = places[p];
      const TensorSpec& t = spec_.tensors[i];
      const uint64_t first = ChunkBegin(spec_, c);
      weights[i].codes.replace(first * WireBytes(t.serving_format), pieces[p].data.size(), pieces[p].data);
      const auto to = static_cast<std::ptrdiff_t>(ScalesOf(t, first, ChunkEnd(spec_, t, c)).first);
      std::copy(pieces[p].scales.begin(), pieces[p].scales.end(), weights[i].scales.begin() + to);
    }
    return weights;
  }
  void ChangeNow(uint32_t tensor, uint64_t seed) {
    OnStrand([&] { Change(tensor, seed); });
  }
  // On the strand: some elements of the tensor from `first` on, as little updates do.
  void Nudge(uint32_t tensor, uint64_t seed) {
    OnStrand([&] {
      auto values = std::make_unique<std::vector<float>>(spec_.tensors[tensor].elements);
      for (size_t e = 0; e < values->size(); ++e) {
        (*values)[e] = static_cast<float>((e * 7 + 31 + tensor) % 1009);
        if (e % 97 == seed % 97) (*values)[e] *= 1.01f;
      }
      const auto* in = reinterpret_cast<const std::byte*>(values->data());
      store_->Load({tensor, 0, spec_.tensors[tensor].elements}, kernels::FindWireFormat("fp32"), in,
                   [values = std::move(values)](const TaskResult&) {});
    });
  }

  TagStorage tags_ = {};  // before Make, like the next
  uint32_t most_tags_ = 0;
  bool is_part_ = false;
  Metrics metrics_{{}};
  std::unique_ptr<RunMetrics> run_;
  std::unique_ptr<Followers> followers_;
  std::vector<std::shared_ptr<VersionReader>> readers_;
  absl::Mutex mu_;
  FollowFigures shown_;
};

}  // namespace ballast::testing
