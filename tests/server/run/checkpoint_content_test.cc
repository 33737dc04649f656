// A run's snapshot, through the files of a checkpoint and back: every byte of every format, and all that the run knew.
#include "server/run/checkpoint_content.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "proto/checkpoint/manifest.h"
#include "proto/tls/sha256.h"

#include "server/convert/canonical_spec.h"
#include "server/convert/checkpoint_json.h"
#include "server/store/checkpoint_layout.h"
#include "tests/server/storage/model_fs.h"
#include "tests/server/store/trained_store.h"

namespace ballast {
namespace {

constexpr uint64_t kSteps = 3;

// A run after some steps, its snapshot, and the folder that it is written to.
class WrittenRun {
 public:
  explicit WrittenRun(const testing::Kernel& kernel) : store_(&device_, kernel), canonical_(Canonical()) {
    for (uint64_t step = 1; step <= kSteps; ++step) {
      store_.FillGradients(step);
      store_.DoAll(testing::kUpdate, step);
    }
    image_ = store_.Image();
    figures_ = {.generation = 4, .applied = 2, .skipped = 1, .rewinds = 5, .policy = SpikePolicy(spec().spikes)};
    figures_.policy.GoOnFrom({.rest = 7, .skips = 8, .rewinds = 9});
    memory_.result = {.step = kSteps, .outcome = Outcome::kSkipped, .reason = "spike", .grad_norm = 0.1};
    memory_.result.loss = 1.0 / 3;
    memory_.client_states = {ClientState{2, std::string("a\0b", 3)}};
    memory_.last_lr = std::vector<double>(store_.tensors(), 1e-3);
    memory_.detector = SpikeDetector(spec().spikes, std::vector<double>(spec().layers.size(), 2.3));
    // A loss spike is going on at the end, and may become known.
    for (uint64_t step = 1; step <= 200; ++step) memory_.detector.Observe(FoundAt(step, step > 197 ? 4 : 1));
    for (uint32_t t = 0; t < store_.tensors(); ++t) counts_.push_back(store_->count(t));
  }

  const RunSpec& spec() const { return store_.spec(); }
  // After the checkpoint's 200 steps, RMS_t is far above what it was at the most before.
  StepFindings FoundAt(uint64_t step, double loss) const {
    const double noise = 0.01 * static_cast<double>(step % 7), high = step > 200 ? 12 : 3;
    const LayerValue rms = {.value = (step % 40 == 0 ? high : 1) + noise};
    return {.step = step,
            .rms = std::vector<LayerValue>(spec().layers.size(), rms),
            .loss = loss + noise,
            .grad_norm = 0.3 + noise};
  }
  CheckpointContent Content() {
    return MakeContent({.spec = &spec(),
                        .canonical_spec = &canonical_,
                        .store = &*store_,
                        .codec = &JsonCheckpoints(),
                        .image = &image_,
                        .memory = &memory_,
                        .counts = &counts_,
                        .figures = figures_});
  }
  void Write() {
    ASSERT_TRUE(fs_.MakeFolder("/d").ok());
    auto folder = RunFolder::Open(&fs_, "/d", "r1");
    ASSERT_TRUE(folder.ok());
    CheckpointWriter writer({.fs = &fs_, .threads = &threads_, .rate = &rate_});
    absl::Notification written;
    writer.Write({.folder = std::make_shared<RunFolder>(*std::move(folder)),
                  .run_id = "r1",
                  .spec_sha256 = Sha256Hex(canonical_),
                  .step = kSteps,
                  .content = [this] { return Content(); }},
                 [&](const auto& result) {
                   EXPECT_TRUE(result.ok()) << result.status();
                   written.Notify();
                 });
    written.WaitForNotification();
  }
  absl::StatusOr<CheckpointedRun> Read(StoreImage* image) {
    const auto checkpoint = CheckpointReader::Open(&fs_, folder());
    if (!checkpoint.ok()) return checkpoint.status();
    return ReadContent(
        *checkpoint, spec(), *store_, JsonCheckpoints(), &threads_, [] {}, image);
  }
  std::string folder() const { return absl::StrCat("/d/r1/", NameOf({1, kSteps})); }
  StoreImage UsedImage() {
    StoreImage image = store_->NewImage().value();
    std::memset(image.shards[0].data(), 0xa5, image.shards[0].bytes());
    return image;
  }
  // But for padding, which every update clears before it reads it.
  bool SameAs(const StoreImage& other) {
    for (uint32_t t = 0; t < store_.tensors(); ++t) {
      for (size_t p = 0; p < KernelOf(spec(), t).planes.size(); ++p) {
        if (store_->SavedPlane(image_, t, p) != store_->SavedPlane(other, t, p)) return false;
      }
    }
    return true;
  }
  // Goes on from the image, or from what there is, and keeps the image of that.
  void Train(const StoreImage* from) {
    for (uint32_t t = 0; from != nullptr && t < store_.tensors(); ++t) store_->Restore(t, *from, counts_[t]);
    for (uint64_t step = kSteps + 1; step <= 2 * kSteps; ++step) {
      store_.FillGradients(step);
      store_.DoAll(testing::kUpdate, step);
    }
    image_ = store_.Image();
  }

  ModelFs fs_;
  RateLimit rate_{0};
  DiskThreads threads_{2};
  CpuDevice device_{{.threads = 1}};
  testing::Store store_;
  std::string canonical_;
  StoreImage image_;
  RunFigures figures_;
  RunMemory memory_;
  std::vector<ParameterStore::UpdateCount> counts_;

 private:
  std::string Canonical() const {
    v1::RunSpec wire = testing::MakeSpec("r1", {{"a", {70000}, "fp32"}});
    return SerializeCanonical(ballast::Canonical(wire));
  }
};

TEST(CheckpointContentTest, EveryFormatComesBackToTheByte) {
  for (const kernels::Kernel& kernel : kernels::Kernels()) {
    SCOPED_TRACE(absl::StrCat(kernel.rule, " ", kernel.master, " ", kernel.state));
    WrittenRun run({kernel.rule, kernel.master, kernel.state});
    run.Write();
    StoreImage image = run.UsedImage();
    const auto read = run.Read(&image);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_TRUE(run.SameAs(image));
    run.Train(nullptr);
    const StoreImage uncut = std::move(run.image_);
    run.Train(&image);
    EXPECT_TRUE(run.SameAs(uncut)) << "what was read back goes on otherwise";
  }
}

TEST(CheckpointContentTest, TheDefaultFormatsTakeAsManyBytesAsTheySay) {
  WrittenRun run({"adamw", "split24", "companded8"});
  uint64_t bytes = 0, elements = 0;
  for (const CheckpointShard& shard : LayOutCheckpoint(run.spec())) {
    for (const CheckpointPlane& plane : shard.planes) bytes += plane.bytes;
  }
  for (const TensorSpec& tensor : run.spec().tensors) elements += tensor.elements;
  // Scales of a last block that is not whole are the only excess.
  EXPECT_NEAR(static_cast<double>(bytes) / static_cast<double>(elements), 5.125, 0.001);
}

TEST(CheckpointContentTest, WhatTheRunKnewComesBack) {
  WrittenRun run({"adamw", "split24", "companded8"});
  run.Write();
  StoreImage image = run.UsedImage();
  const auto read = run.Read(&image);
  ASSERT_TRUE(read.ok()) << read.status();
  // The same JSON is the same in every field that it has.
  EXPECT_EQ(JsonCheckpoints().run_json(run.spec(), read->figures, read->memory, read->counts),
            JsonCheckpoints().run_json(run.spec(), run.figures_, run.memory_, run.counts_));
  EXPECT_EQ(read->memory.client_states[0]->bytes, std::string("a\0b", 3));
  EXPECT_EQ(read->memory.result.loss, run.memory_.result.loss);
  // What it learned goes on as it would have.
  SpikeDetector ours(run.spec().spikes, std::vector<double>(run.spec().layers.size(), 2.3)),
      theirs = run.memory_.detector;
  ours.GoOnFrom(read->memory.detector.state());
  uint64_t spikes = 0, rms = 0;
  for (uint64_t step = 201; step <= 520; ++step) {
    const StepFindings found = run.FoundAt(step, step < 204 || step % 100 < 9 ? 4 : 1);
    const std::vector<SpikeEvent> events = ours.Observe(found);
    const std::vector<SpikeEvent> wanted = theirs.Observe(found);
    ASSERT_EQ(events.size(), wanted.size());
    for (size_t i = 0; i < events.size(); ++i) {
      EXPECT_EQ(events[i].since, wanted[i].since);
      EXPECT_EQ(events[i].threshold, wanted[i].threshold);
      spikes += events[i].kind == SpikeKind::kLoss ? 1 : 0;
      rms += events[i].kind == SpikeKind::kRms ? 1 : 0;
    }
  }
  EXPECT_GE(spikes, 3u);
  EXPECT_GE(rms, 1u);
  EXPECT_EQ(ours.score(SpikeKind::kRms).counts().false_alarms, theirs.score(SpikeKind::kRms).counts().false_alarms);
}

TEST(CheckpointContentTest, WithoutAnImageAllIsComparedAlone) {
  WrittenRun run({"adamw", "split24", "companded8"});
  run.Write();
  const auto read = run.Read(nullptr);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->memory.client_states[0]->bytes, std::string("a\0b", 3));
  for (const char* name : {"model-00001-of-00001.safetensors", "optimizer-00001-of-00001.safetensors", "run.json"}) {
    const std::string path = absl::StrCat(run.folder(), "/", name);
    run.fs_.Flip(path, run.fs_.Content(path).size() - 2, 0);
    const absl::Status damaged = run.Read(nullptr).status();
    EXPECT_TRUE(absl::IsDataLoss(damaged)) << damaged;
    EXPECT_THAT(std::string(damaged.message()), ::testing::HasSubstr(name));
    run.fs_.Flip(path, run.fs_.Content(path).size() - 2, 0);
  }
  EXPECT_TRUE(run.Read(nullptr).ok());
}

TEST(CheckpointContentTest, AnotherRunsFilesAreRefused) {
  WrittenRun run({"adamw", "split24", "companded8"});
  run.Write();
  WrittenRun other({"adamw", "fp32", "fp32"});
  const auto checkpoint = CheckpointReader::Open(&run.fs_, run.folder());
  ASSERT_TRUE(checkpoint.ok());
  StoreImage image = other.UsedImage();
  const auto read = ReadContent(
      *checkpoint, other.spec(), *other.store_, JsonCheckpoints(), &other.threads_, [] {}, &image);
  EXPECT_TRUE(absl::IsDataLoss(read.status())) << read.status();
  EXPECT_THAT(std::string(read.status().message()), ::testing::HasSubstr("is not of this run"));
}

TEST(CheckpointLayoutTest, FilesEndWithThePlaneThatFillsThem) {
  WrittenRun run({"adamw", "split24", "companded8"});
  const auto shards = LayOutCheckpoint(run.spec(), /*shard_bytes=*/10000);
  ASSERT_GT(shards.size(), 4u);
  EXPECT_EQ(shards[0].name, "model-00001-of-00002.safetensors") << "the first tensor fills one";
  EXPECT_EQ(shards[1].planes.size(), 2u) << "and the others share one";
  for (const CheckpointShard& shard : shards) EXPECT_EQ(shard.header.size() % 4096, 0u);
  EXPECT_EQ(LayOutCheckpoint(run.spec()).size(), 2u);
}

}  // namespace
}  // namespace ballast
