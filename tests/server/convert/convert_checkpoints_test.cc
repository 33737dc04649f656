#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "server/base/clock.h"
#include "server/convert/amendment.h"
#include "server/convert/canonical_spec.h"
#include "server/convert/convert.h"
#include "tests/server/specs.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::SmallSpec;

v1::RunSpec WithPolicy(uint32_t every_steps, double every_seconds, uint32_t retain) {
  v1::RunSpec spec = SmallSpec();
  spec.mutable_checkpoint()->set_every_steps(every_steps);
  spec.mutable_checkpoint()->set_every_seconds(every_seconds);
  spec.mutable_checkpoint()->set_retain(retain);
  return spec;
}

// By a daemon that has storage.
CheckpointSettings CheckpointsOf(const v1::RunSpec& spec) { return *ToRunSpec(spec, {}, true).value().checkpoints; }

TEST(ConvertCheckpointsTest, WhereThereIsStorageEveryRunIsWrittenEveryTenMinutes) {
  EXPECT_FALSE(ToRunSpec(SmallSpec(), {}).value().checkpoints.has_value());
  for (const v1::RunSpec& spec : {SmallSpec(), WithPolicy(0, 0, 0)}) {
    const CheckpointSettings settings = CheckpointsOf(spec);
    EXPECT_EQ(settings.every_steps, 0u);
    EXPECT_EQ(settings.every_s, 600);
    EXPECT_EQ(settings.retain, 2u);
  }
}

TEST(ConvertCheckpointsTest, WhatIsGivenTakesThePlaceOfTheDefault) {
  const CheckpointSettings steps = CheckpointsOf(WithPolicy(50, 0, 7));
  EXPECT_EQ(steps.every_steps, 50u);
  EXPECT_EQ(steps.every_s, 0);
  EXPECT_EQ(steps.retain, 7u);
  EXPECT_EQ(CheckpointsOf(WithPolicy(0, 0.5, 0)).every_s, 0.5);
  const CheckpointSettings both = CheckpointsOf(WithPolicy(50, 30, 0));
  EXPECT_EQ(both.every_steps, 50u);
  EXPECT_EQ(both.every_s, 30);
}

v1::RunSpec Journaled(v1::DurabilityMode mode, uint32_t steps) {
  v1::RunSpec spec = SmallSpec();
  spec.mutable_checkpoint()->set_durability(mode);
  spec.mutable_checkpoint()->set_journal_steps(steps);
  return spec;
}

TEST(ConvertCheckpointsTest, AJournalIsThereWhereItIsAskedFor) {
  EXPECT_FALSE(HasJournal(*ToRunSpec(SmallSpec(), {}, true)));
  const CheckpointSettings journal = CheckpointsOf(Journaled(v1::DURABILITY_MODE_JOURNAL, 0));
  EXPECT_EQ(journal.durability, DurabilityMode::kJournal);
  EXPECT_EQ(journal.journal_steps, 16u);
  const CheckpointSettings sync = CheckpointsOf(Journaled(v1::DURABILITY_MODE_JOURNAL_SYNC, 3));
  EXPECT_EQ(sync.durability, DurabilityMode::kJournalSync);
  EXPECT_EQ(sync.journal_steps, 3u);
  EXPECT_EQ(Canonical(Journaled(v1::DURABILITY_MODE_JOURNAL, 0), true).checkpoint().journal_steps(), 16u);
}

TEST(ConvertCheckpointsTest, AWrongJournalIsRefusedByName) {
  for (const auto& [spec, why] : std::vector<std::pair<v1::RunSpec, std::string>>{
           {Journaled(v1::DURABILITY_MODE_JOURNAL, 10'001), "checkpoint.journal_steps is 10001; wanted: 0"},
           {Journaled(v1::DURABILITY_MODE_CHECKPOINT, 3), "and 0 where durability is DURABILITY_MODE_CHECKPOINT"},
           {Journaled(static_cast<v1::DurabilityMode>(9), 0), "checkpoint.durability is 9, which this daemon"}}) {
    EXPECT_THAT(std::string(ToRunSpec(spec, {}, true).status().message()), HasSubstr(why));
  }
}

TEST(ConvertCheckpointsTest, WhatCannotBeIsRefusedByName) {
  const auto refused = [](const v1::RunSpec& spec, bool has_storage) {
    const absl::Status status = ToRunSpec(spec, {}, has_storage).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refused(WithPolicy(1, 0, 0), false), AllOf(HasSubstr("checkpoint is given"), HasSubstr("storage.dir")));
  EXPECT_THAT(refused(WithPolicy(0, 0, 0), false), HasSubstr("checkpoint is given"));
  EXPECT_THAT(refused(WithPolicy(1, 0, 1), true), HasSubstr("checkpoint.retain is 1; wanted: 2 to 100"));
  EXPECT_THAT(refused(WithPolicy(1, 0, 101), true), HasSubstr("checkpoint.retain is 101"));
  EXPECT_TRUE(ToRunSpec(WithPolicy(1, 0, 100), {}, true).ok());
  EXPECT_THAT(refused(WithPolicy(0, -1, 0), true), HasSubstr("checkpoint.every_seconds is -1; wanted: 0"));
  EXPECT_THAT(refused(WithPolicy(0, 2e6, 0), true), HasSubstr("checkpoint.every_seconds is 2e+06"));
  EXPECT_THAT(refused(WithPolicy(0, std::numeric_limits<double>::quiet_NaN(), 0), true),
              HasSubstr("checkpoint.every_seconds is nan"));
}

std::string StoredDifference(const v1::RunSpec& a, const v1::RunSpec& b) {
  return FirstDifference(Canonical(a, true), Canonical(b, true)).value_or("none");
}

TEST(ConvertCheckpointsTest, TheCanonicalSpecHasThePolicyWhereThereIsStorage) {
  EXPECT_FALSE(Canonical(SmallSpec()).has_checkpoint());
  const v1::CheckpointPolicy filled = Canonical(SmallSpec(), true).checkpoint();
  EXPECT_EQ(filled.every_seconds(), 600);
  EXPECT_EQ(filled.retain(), 2u);
  EXPECT_EQ(StoredDifference(SmallSpec(), WithPolicy(0, 600, 2)), "none");
  EXPECT_EQ(StoredDifference(SmallSpec(), WithPolicy(0, 0, 0)), "none");
  EXPECT_EQ(StoredDifference(WithPolicy(5, 0, 0), WithPolicy(5, 0, 2)), "none");
  EXPECT_EQ(StoredDifference(WithPolicy(5, 0, 0), WithPolicy(6, 0, 0)), "checkpoint.every_steps is 5, asked for is 6");
  EXPECT_EQ(StoredDifference(SmallSpec(), WithPolicy(0, 600, 3)), "checkpoint.retain is 2, asked for is 3");
}

// What is read back from a checkpoint is a canonical spec.
TEST(ConvertCheckpointsTest, ACanonicalSpecIsItsOwnCanonicalForm) {
  for (const v1::RunSpec& spec : {SmallSpec(), WithPolicy(5, 0, 0), WithPolicy(5, 7, 9)}) {
    const v1::RunSpec canonical = Canonical(spec, true);
    EXPECT_EQ(SerializeCanonical(Canonical(canonical, true)), SerializeCanonical(canonical));
    EXPECT_EQ(CheckpointsOf(canonical).every_steps, CheckpointsOf(spec).every_steps);
    EXPECT_EQ(CheckpointsOf(canonical).every_s, CheckpointsOf(spec).every_s);
  }
}

TEST(ConvertCheckpointsTest, AnAmendmentMayChangeIt) {
  const v1::RunSpec existing = Canonical(SmallSpec(), true);
  EXPECT_TRUE(CheckAmendment(existing, Canonical(WithPolicy(5, 0, 10), true)).ok());
  EXPECT_TRUE(CheckAmendment(Canonical(WithPolicy(5, 0, 10), true), existing).ok());
  v1::RunSpec other = WithPolicy(5, 0, 10);
  other.set_seed(8);
  EXPECT_THAT(
      std::string(CheckAmendment(existing, Canonical(other, true)).message()),
      AllOf(HasSubstr("seed is 7, asked for is 8"), HasSubstr("max_grad_norm, checkpoint and follow may change")));
}

// The checkpoint's files have the tensors' shapes.
TEST(ConvertCheckpointsTest, TensorsKeepTheirShape) {
  const RunSpec made = ToRunSpec(testing::MakeSpec("r1", {{"w", {6, 5, 4}}, {"s", {}}}), {}).value();
  EXPECT_THAT(made.tensors[0].shape, ElementsAre(6u, 5u, 4u));
  EXPECT_THAT(made.tensors[1].shape, ElementsAre());
}

TEST(ConvertCheckpointsTest, AStepTellsWhichStepIsDurable) {
  const RunSpec spec = testing::Made(SmallSpec());
  EXPECT_EQ(FromResult({.step = 7}, spec).durable_step(), 0u);
  EXPECT_EQ(FromResult({.step = 7, .durable_step = 5}, spec).durable_step(), 5u);
}

TEST(ConvertCheckpointsTest, TheStatusTellsTheAgeOfTheNewest) {
  const v1::DurabilityStatus none = FromDurability({});
  EXPECT_EQ(none.durable_step(), 0u);
  EXPECT_EQ(none.checkpoint_age_s(), 0);
  const v1::DurabilityStatus status = FromDurability({.durable_step = 120,
                                                      .checkpoint_bytes = 4096,
                                                      .written_at_s = MonotonicSeconds() - 100,
                                                      .last_failure = "the disk is full",
                                                      .restored = "step 80",
                                                      .writing = true});
  EXPECT_EQ(status.durable_step(), 120u);
  EXPECT_EQ(status.checkpoint_bytes(), 4096u);
  EXPECT_GE(status.checkpoint_age_s(), 100);
  EXPECT_LT(status.checkpoint_age_s(), 200);
  EXPECT_EQ(status.last_failure(), "the disk is full");
  EXPECT_EQ(status.restored(), "step 80");
  EXPECT_TRUE(status.writing());
}

TEST(ConvertCheckpointsTest, CheckpointsAreToldAsTheRegistryHasThem) {
  const v1::CheckpointResponse made =
      FromCheckpointed({.step = 120, .number = 7, .folder = "/data/x", .bytes = 10, .seconds = 1.5});
  EXPECT_EQ(made.step(), 120u);
  EXPECT_EQ(made.number(), 7u);
  EXPECT_EQ(made.folder(), "/data/x");
  EXPECT_EQ(made.bytes(), 10u);
  EXPECT_EQ(made.seconds(), 1.5);
  const v1::ListCheckpointsResponse listed = FromStored({{.number = 7,
                                                          .step = 120,
                                                          .generation = 2,
                                                          .bytes = 10,
                                                          .folder = "/data/x",
                                                          .written_at = "2026-11-23T10:00:00Z",
                                                          .state = "kept"},
                                                         {.number = 8, .step = 160, .state = "newest"}});
  ASSERT_EQ(listed.checkpoints_size(), 2);
  EXPECT_EQ(listed.checkpoints(0).number(), 7u);
  EXPECT_EQ(listed.checkpoints(0).step(), 120u);
  EXPECT_EQ(listed.checkpoints(0).generation(), 2u);
  EXPECT_EQ(listed.checkpoints(0).bytes(), 10u);
  EXPECT_EQ(listed.checkpoints(0).folder(), "/data/x");
  EXPECT_EQ(listed.checkpoints(0).written_at(), "2026-11-23T10:00:00Z");
  EXPECT_EQ(listed.checkpoints(0).state(), "kept");
  EXPECT_EQ(listed.checkpoints(1).state(), "newest");
}

}  // namespace
}  // namespace ballast
