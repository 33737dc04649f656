// What a run's journal says is durable, when it is off, and what is left of it when its meaning is gone.
#include "server/storage/journal.h"

#include <gmock/gmock.h>
#include <google/protobuf/unknown_field_set.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"

#include "ballast/v1/journal.pb.h"
#include "kernels/matrix/product.h"
#include "server/storage/journal_record.h"
#include "tests/server/run/journaled_run.h"

namespace ballast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST(JournalTest, AFullDiskIsToldAndTheNextCheckpointBringsItBack) {
  ModelFs fs;
  MakeRunFolder(&fs);
  JournaledRun run(&fs);
  run.Step();
  run.Begin();
  run.Publish();
  run.Step();
  EXPECT_EQ(run.Durable(), 2u);
  fs.set_capacity(1);
  run.Step();
  run.Step();
  EXPECT_EQ(run.failed().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(run.failed().message()), HasSubstr(kFolder));
  EXPECT_EQ(run.Durable(), 2u);
  run.OnStrand([&] { EXPECT_FALSE(run.journal().WantsCheckpoint()); });  // the disk is given time
  fs.set_capacity(1 << 30);
  const uint64_t base = run.Begin();
  run.Publish();
  run.Step();
  EXPECT_EQ(run.Durable(), 5u);
  EXPECT_EQ(Replay(&fs, base, 4)->survey.step, 5u);
}

TEST(JournalTest, TriesThatTheDiskHasNoRoomForLeaveNoFiles) {
  ModelFs fs;
  MakeRunFolder(&fs);
  const auto files = [&fs] {
    std::vector<std::string> names;
    const auto entries = fs.List(kFolder);
    for (const Fs::Entry& entry : *entries) names.push_back(entry.name);
    return names;
  };
  {
    JournaledRun run(&fs);
    run.Step();
    run.Begin();
    run.Publish();
    run.Step();
    fs.set_capacity(1);
    for (int tries = 0; tries < 3; ++tries) {
      run.Step();
      run.Begin();
      run.Publish(false);
    }
    fs.set_capacity(1 << 30);  // for the file of the journal, and not for the checkpoint
    for (int tries = 0; tries < 3; ++tries) {
      run.Step();
      run.Begin();
      run.Publish(false);
    }
  }
  EXPECT_THAT(files(), ElementsAre(SegmentName(1))) << "which leads from the checkpoint that there is to step 2";
  {
    JournaledRun run(&fs);
    run.Step();
    const uint64_t base = run.Begin();
    run.Publish();
    run.Step();
    run.Begin();  // its file goes on from the one before, whatever becomes of the checkpoint
    run.Publish(false);
    run.Step();
    EXPECT_EQ(run.Durable(), 3u);
    EXPECT_EQ(Replay(&fs, base, 1)->survey.step, 3u);
  }
}

TEST(JournalTest, ACrashAfterACrashGoesOnFromWhatTheFirstHasLeft) {
  ModelFs fs;
  MakeRunFolder(&fs);
  uint64_t base = 0;
  {
    JournaledRun run(&fs);
    run.Step();
    base = run.Begin();
    run.Publish();
    run.Step();
    run.Step();
  }
  const std::string first = absl::StrCat(kFolder, "/", SegmentName(1));
  fs.Truncate(first, fs.Content(first).size() - OutputFile::kDirect + 50);  // the end of step 3 is torn
  const auto left = Replay(&fs, base, 1);
  ASSERT_TRUE(left.ok()) << left.status();
  EXPECT_EQ(left->survey.step, 2u);
  {
    JournaledRun run(&fs);
    run.GoOnFrom(left->survey, base, 1);
    run.Step();
    run.Step();
    EXPECT_EQ(run.Durable(), 4u);
  }
  const auto again = Replay(&fs, base, 1);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_THAT(again->updates, ElementsAre(2, 2, 3, 3, 4, 4));
  EXPECT_THAT(again->survey.files, SizeIs(2));
  // What comes before the second file is as it was when that was begun, or it is damaged.
  fs.Truncate(first, OutputFile::kDirect);
  EXPECT_THAT(Replay(&fs, base, 1).status().ToString(), HasSubstr("the end of the file before is missing"));
  EXPECT_TRUE(fs.RemoveFile(first).ok());
  EXPECT_EQ(Replay(&fs, base, 1)->survey.step, 1u);  // no file goes on from the checkpoint
}

// A file of the first edition, which did not say so, is refused where steps of it stand, and passes where none does.
TEST(JournalTest, StepsOfOtherNumericsAreRefused) {
  ModelFs fs;
  MakeRunFolder(&fs);
  JournaledRun run(&fs);
  run.Step();
  const uint64_t base = run.Begin();
  run.Publish();
  run.Step();
  const auto survey = [&] {
    auto chain = JournalChain(&fs, kFolder, base);
    EXPECT_TRUE(chain.ok()) << chain.status();
    EXPECT_EQ(chain->front().head.numerics, kernels::kNumerics);
    chain->front().head.numerics = 1;
    return SurveyJournal(&fs, *std::move(chain), 1);
  };
  const absl::Status refused = survey().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("stop it with SIGTERM"));
  run.Rewind(1);
  const auto nothing = survey();
  ASSERT_TRUE(nothing.ok()) << nothing.status();
  EXPECT_EQ(nothing->steps, 0u);
}

// Of a run with a rule over matrices, whose bits are the library's.
TEST(JournalTest, StepsOfAnotherLibraryOfMatrixProductsAreRefused) {
  ModelFs fs;
  MakeRunFolder(&fs);
  JournaledRun run(&fs);
  run.Step();
  const uint64_t base = run.Begin();
  run.Publish();
  run.Step();
  const auto survey = [&](const std::string& products) {
    auto chain = JournalChain(&fs, kFolder, base);
    EXPECT_EQ(chain->front().head.products, "") << "this run has no matrices";
    chain->front().head.products = products;
    return SurveyJournal(&fs, *std::move(chain), 1, "cuBLAS 130100 on a GPU").status();
  };
  EXPECT_TRUE(survey("cuBLAS 130100 on a GPU").ok());
  const absl::Status refused = survey("OpenBLAS 0.1 Katmai");
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("made by OpenBLAS 0.1 Katmai; this machine has cuBLAS 130100 on a GPU"));
}

TEST(JournalTest, AGradientLargerThanItsMemoryPasses) {
  ModelFs fs;
  MakeRunFolder(&fs);
  const RunSpec spec = SpecOf(DurabilityMode::kJournalSync, JournalWriter::kBytes / 3);
  JournaledRun run(&fs, spec);
  run.Step();
  const uint64_t base = run.Begin();
  run.Publish();
  run.Step();
  const auto replayed = Replay(&fs, base, 1, spec);
  ASSERT_TRUE(replayed.ok()) << replayed.status();
  EXPECT_THAT(replayed->updates, ElementsAre(2, 2));
}

TEST(JournalTest, StepsWaitWhereTooManyAreNotDurable) {
  ModelFs fs;
  MakeRunFolder(&fs);
  JournaledRun run(&fs, SpecOf(DurabilityMode::kJournal));
  run.Step();
  run.Begin();  // not published: nothing is durable
  run.OnStrand([&] {
    EXPECT_TRUE(run.journal().MayTell(1));
    EXPECT_FALSE(run.journal().Behind(1));
    EXPECT_TRUE(run.journal().Behind(2));
  });
  run.Publish();
  run.OnStrand([&] { EXPECT_FALSE(run.journal().Behind(2)); });
}

TEST(JournalTest, ALongOneWantsACheckpoint) {
  ModelFs fs;
  MakeRunFolder(&fs);
  JournaledRun run(&fs, SpecOf(DurabilityMode::kJournalSync), 1000);
  run.Step();
  run.Begin();
  run.Publish();
  run.OnStrand([&] { EXPECT_FALSE(run.journal().WantsCheckpoint()); });
  for (int i = 0; i < 10; ++i) run.Step();
  run.OnStrand([&] { EXPECT_TRUE(run.journal().WantsCheckpoint()); });
}

TEST(JournalTest, WhatWasReplacedIsNotJournaledUntilTheNextCheckpoint) {
  ModelFs fs;
  MakeRunFolder(&fs);
  JournaledRun run(&fs);
  run.Step();
  const uint64_t old = run.Begin();
  run.Publish();
  run.Step();
  run.OnStrand([&] {
    run.journal().OnReplaced();
    EXPECT_TRUE(run.journal().WantsCheckpoint());
  });
  run.Step();
  EXPECT_EQ(Replay(&fs, old, 1)->survey.step, 2u);
  const uint64_t base = run.Begin();
  run.Publish();
  run.Step();
  EXPECT_EQ(Replay(&fs, base, 3)->survey.step, 4u);
  EXPECT_THAT(*ListJournal(&fs, kFolder), SizeIs(1));  // what the new checkpoint makes superfluous is gone
}

TEST(JournalTest, NothingOfAnotherHistoryIsLeft) {
  for (const bool jumps : {false, true}) {
    ModelFs fs;
    MakeRunFolder(&fs);
    JournaledRun run(&fs);
    run.Step();
    run.Step();
    const uint64_t base = run.Begin();
    run.Publish();
    run.Step();
    run.Rewind(jumps ? 3 : 1, jumps);  // before the checkpoint, or to what was brought
    EXPECT_EQ(Replay(&fs, base, 2)->survey.step, 2u);
    EXPECT_THAT(*ListJournal(&fs, kFolder), SizeIs(0));
  }
}

// Of a file that every daemon since the first can read, but for a field in its record.
TEST(JournalVersionTest, AFieldThatIsNotKnownIsNotPassedOver) {
  for (const bool in_update : {false, true}) {
    v1::JournalRecord record;
    record.mutable_update()->set_step(1);
    google::protobuf::Message* changed = &record;
    if (in_update) changed = record.mutable_update();
    ASSERT_TRUE(ParseRecord(record.SerializeAsString(), "/a").ok());
    changed->GetReflection()->MutableUnknownFields(changed)->AddVarint(99, 1);
    const absl::Status refused = ParseRecord(record.SerializeAsString(), "/a").status();
    EXPECT_TRUE(absl::IsFailedPrecondition(refused));
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr(in_update ? "/a has the field update.99" : "/a has the field 99"));
  }
  v1::JournalRecord segment;
  segment.mutable_segment()->set_format(1);
  ASSERT_TRUE(ParseSegmentHead(segment.SerializeAsString(), "/a").ok());
  google::protobuf::Message* const head = segment.mutable_segment();
  head->GetReflection()->MutableUnknownFields(head)->AddVarint(99, 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(ParseSegmentHead(segment.SerializeAsString(), "/a").status()));
}

}  // namespace
}  // namespace ballast::testing
