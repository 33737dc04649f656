// A run that has nothing but a journal, on a disk in memory, and what is read back of it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

#include "server/run/journal_replay.h"
#include "server/storage/journal.h"
#include "server/storage/journal_files.h"
#include "tests/server/storage/model_fs.h"

namespace ballast::testing {

inline constexpr char kFolder[] = "/run/journal";
inline constexpr uint32_t kTensors = 2;

inline RunSpec SpecOf(DurabilityMode durability, uint64_t elements = 5) {
  RunSpec spec{.run_id = "r"};
  spec.groups.push_back({.hyper = {0.5}});
  for (uint32_t t = 0; t < kTensors; ++t) {
    TensorSpec tensor;
    tensor.name = absl::StrCat("t", t);
    tensor.elements = elements + t;
    tensor.gradient_format = kernels::FindWireFormat("fp32");
    spec.tensors.push_back(tensor);
  }
  spec.checkpoints = CheckpointSettings{.durability = durability, .journal_steps = 2};
  return spec;
}

inline std::string GradientOf(uint64_t step, uint32_t tensor, uint64_t elements) {
  std::string bytes(elements * sizeof(float), '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(step * 31 + tensor * 7 + i);
  return bytes;
}

// A run that has nothing but a journal. Its checkpoints are on the disk when Publish says so.
class JournaledRun {
 public:
  explicit JournaledRun(Fs* fs, RunSpec spec = SpecOf(DurabilityMode::kJournalSync), uint64_t most_bytes = 1 << 30)
      : spec_(std::move(spec)), strand_({.name = "r"}) {
    OnStrand([&] {
      journal_ = std::make_unique<Journal>(
          Journal::Environment{.run_id = "r",
                               .spec_sha256 = "spec",
                               .tells_late = spec_.checkpoints->durability == DurabilityMode::kJournalSync,
                               .most_steps = spec_.checkpoints->journal_steps,
                               .strand = &strand_,
                               .fs = fs,
                               .folder = kFolder,
                               .most_bytes = most_bytes,
                               .on_moved = [this] { Moved(); },
                               .on_failed = [this](const auto& why) { failed_ = why; },
                               .on_logged = [](uint64_t) {}});
    });
  }
  ~JournaledRun() {
    OnStrand([&] { journal_.reset(); });
    strand_.Stop();
  }

  // Updates all tensors, closes the step, and waits until its result may be told.
  void Step() {
    ++step_;
    for (uint32_t t = 0; t < kTensors; ++t) Update(t);
    OnStrand([&] { journal_->LogClosed(step_, 0, absl::StrCat("end of ", step_)); });
    AwaitTold();
  }
  void Update(uint32_t tensor) {
    const std::string gradient = GradientOf(step_, tensor, spec_.tensors[tensor].elements);
    const JournaledUpdate update{.step = step_, .tensor = tensor, .hyper = {0.5}, .gradient_format = "fp32"};
    absl::Notification taken;
    strand_.Post([&] {
      journal_->LogUpdate(update, {reinterpret_cast<const std::byte*>(gradient.data()), gradient.size()},
                          [&] { taken.Notify(); });
    });
    taken.WaitForNotification();
  }
  // The identity of a checkpoint of the last step.
  uint64_t Begin() {
    uint64_t base = 0;
    OnStrand([&] {
      journal_->OnCheckpointBegun(step_);
      base = journal_->base();
    });
    return base;
  }
  void Publish(bool published = true) {
    OnStrand([&] { journal_->OnCheckpointOver(published); });
  }
  void Rewind(uint64_t to, bool jumps = false) {
    absl::Notification done;
    OnStrand([&] {
      journal_->OnRewound(to, ++generation_, jumps);
      journal_->WhenRewound([&](const absl::Status&) { done.Notify(); });
    });
    done.WaitForNotification();
    step_ = to;
  }
  void GoOnFrom(const JournalSurvey& survey, uint64_t base, uint64_t base_step) {
    step_ = survey.step;
    OnStrand([&] { journal_->GoOnFrom(step_, {.base = base, .base_step = base_step, .tail = survey.tail()}); });
  }
  void OnStrand(absl::FunctionRef<void()> task) {
    absl::Notification done;
    strand_.Post([&] {
      task();
      done.Notify();
    });
    done.WaitForNotification();
  }
  uint64_t Durable() {
    uint64_t durable = 0;
    OnStrand([&] { durable = journal_->durable_step(); });
    return durable;
  }
  Journal& journal() { return *journal_; }
  uint64_t step() const { return step_; }
  absl::Status failed() {
    absl::Status failed;
    OnStrand([&] { failed = failed_; });
    return failed;
  }

 private:
  void Moved() {
    if (waiting_ == nullptr || !journal_->MayTell(step_)) return;
    std::exchange(waiting_, nullptr)->Notify();
  }
  void AwaitTold() {
    absl::Notification told;
    strand_.Post([&] {
      waiting_ = &told;
      Moved();
    });
    told.WaitForNotification();
  }

  const RunSpec spec_;
  std::unique_ptr<Journal> journal_;
  uint64_t step_ = 0, generation_ = 1;
  absl::Notification* waiting_ = nullptr;
  absl::Status failed_;
  Strand strand_;
};

inline void MakeRunFolder(ModelFs* fs) {
  ASSERT_TRUE(fs->MakeFolder("/run").ok());
  ASSERT_TRUE(fs->SyncFolder("").ok());
}

// What the journal has beyond a checkpoint: the steps of its updates, in turn, tensor by tensor.
struct Replayed {
  JournalSurvey survey;
  std::vector<uint64_t> updates = {};
  std::string last = {};
};

inline absl::StatusOr<Replayed> Replay(Fs* fs, uint64_t base, uint64_t base_step, RunSpec spec = SpecOf({})) {
  auto chain = JournalChain(fs, kFolder, base);
  if (!chain.ok()) return chain.status();
  auto survey = SurveyJournal(fs, *std::move(chain), base_step);
  if (!survey.ok()) return survey.status();
  Replayed replayed{.survey = *std::move(survey)};
  if (replayed.survey.steps == 0) return replayed;
  std::string room(spec.tensors.back().elements * sizeof(float) + 64, '\0');
  CheckpointCodec codec;
  codec.read_run_bytes = [](const RunSpec&, const std::string&, const std::string&) { return CheckpointedRun(); };
  const auto run = ReplayJournal(
      {.fs = fs,
       .spec = &spec,
       .codec = &codec,
       .room = [&](uint32_t) { return absl::Span<std::byte>(reinterpret_cast<std::byte*>(room.data()), room.size()); },
       .update =
           [&](const JournaledUpdate& update) {
             replayed.updates.push_back(update.step);
             const std::string wanted = GradientOf(update.step, update.tensor, spec.tensors[update.tensor].elements);
             EXPECT_EQ(room.compare(0, wanted.size(), wanted), 0) << "step " << update.step;
           }},
      replayed.survey);
  if (!run.ok()) return run.status();
  return replayed;
}

}  // namespace ballast::testing
