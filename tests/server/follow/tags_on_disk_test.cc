// Versions that have names, on the disk: written whole or not at all wherever the power is cut, read back to the bit, and
// never given out damaged.
#include <gtest/gtest.h>

#include <random>

#include "absl/strings/str_cat.h"

#include "tests/server/follow/tags_fixture.h"
#include "tests/server/storage/model_fs.h"
#include "tests/server/storage/outcomes.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using testing::ServedWeights;
using testing::TagsTest;

class TagsOnDiskTest : public TagsTest {
 protected:
  void MakeOn(Fs* fs, const std::string& serving, uint32_t most = 4) {
    most_tags_ = most;
    tags_ = {.fs = fs, .threads = &threads_, .rate = &rate_, .run_folder = "/r"};
    Make(serving);
  }
  static void MakeRoot(ModelFs* fs) {
    ASSERT_TRUE(fs->MakeFolder("/r").ok());
    ASSERT_TRUE(fs->SyncFolder("/").ok());
  }
  void LetGo() {
    OnStrand([&] {
      store_->set_before_change(nullptr);
      followers_.reset();
    });
  }
  // A daemon on this disk, which finds what is there.
  void StartAgain(Fs* fs) {
    LetGo();
    ASSERT_TRUE(CleanUpTags(fs, "/r/tags").ok());
    tags_.fs = fs;
    MakeFollowers();
  }
  std::vector<VersionTag> Tags() {
    std::vector<VersionTag> tags;
    OnStrand([&] { tags = followers_->List().tags; });
    return tags;
  }
  std::string FileOf(const std::string& name) {
    for (const VersionTag& tag : Tags()) {
      if (tag.name == name) return tag.file;
    }
    return "";
  }

  ModelFs fs_;  // before the threads
  DiskThreads threads_{1};
  RateLimit rate_{0};
};

class TagFormatsTest : public TagsOnDiskTest, public ::testing::WithParamInterface<const char*> {};

TEST_P(TagFormatsTest, WhatIsReadBackHasTheBitsThatWereServed) {
  MakeRoot(&fs_);
  MakeOn(&fs_, GetParam());
  ASSERT_TRUE(TagNow("good", 5).ok());
  const ServedWeights then = Look();
  const VersionTag made = Tags().at(0);
  ChangeAll(9);
  EXPECT_EQ(*Read(Named("good")), then);
  EXPECT_EQ(memory_bytes() <= FollowMemoryBytes(spec_, plan_), true) << "none is kept for the name";
  StartAgain(&fs_);
  const std::vector<VersionTag> tags = Tags();
  ASSERT_EQ(tags.size(), 1u);
  EXPECT_EQ(tags[0].unreadable, "");
  EXPECT_EQ(tags[0].id, made.id);
  EXPECT_EQ(tags[0].bytes, made.bytes);
  EXPECT_EQ(*Read(Named("good")), then);
  EXPECT_EQ((*Read(Named("good"), {.tensors = {false, false, true}}))[2], then[2]);
  ASSERT_TRUE(Tag("again", Named("good")).ok()) << "of the file";
  EXPECT_EQ(*Read(Named("again")), then);
}

INSTANTIATE_TEST_SUITE_P(Formats, TagFormatsTest,
                         ::testing::Values("", "bf16", "fp16", "fp8-e4m3", "int8-row", "int8-tensor"));

// A name that is given to another version, one that is new, and one that is taken away.
class TagCutTest : public TagsOnDiskTest, public ::testing::WithParamInterface<bool> {};

TEST_P(TagCutTest, AFileIsWholeOrNotThereWhereverThePowerIsCut) {
  const bool untags = GetParam();
  for (int cut = 1;; ++cut) {
    SCOPED_TRACE(cut);
    ModelFs fs;
    MakeRoot(&fs);
    MakeOn(&fs, "bf16");
    ASSERT_TRUE(TagNow("a", 1).ok());
    const ServedWeights old = Look();
    ChangeAll(9);
    const ServedWeights now = Look();
    fs.CutAt(fs.calls() + cut);
    const bool replaced = TagNow("a", 2, /*replace=*/true).ok();
    const bool named = replaced && TagNow("b", 2).ok();
    const bool untagged = named && untags && Untag("b").ok();
    Outcomes outcomes(fs, 12, static_cast<uint64_t>(cut));
    while (const auto left = outcomes.Next()) {
      StartAgain(left.get());
      const auto a = Read(Named("a"));
      ASSERT_TRUE(a.ok()) << a.status() << "\n" << left->Dump();
      EXPECT_TRUE(*a == now || (!replaced && *a == old));
      const auto b = Read(Named("b"));
      EXPECT_TRUE(b.ok() ? *b == now : absl::IsNotFound(b.status())) << b.status();
      EXPECT_TRUE(b.ok() || untags || !named) << "it was promised";
      EXPECT_FALSE(b.ok() && untagged);
      StartAgain(&fs_);  // lets go of it
    }
    LetGo();
    if (untags ? untagged : named) break;
    ASSERT_LT(cut, 200);
  }
}

INSTANTIATE_TEST_SUITE_P(Untags, TagCutTest, ::testing::Bool());

TEST_F(TagsOnDiskTest, WhatAnErrorOrAFullDiskLeavesIsAllAsBefore) {
  for (int call = 1;; ++call) {
    SCOPED_TRACE(call);
    ModelFs fs;
    MakeRoot(&fs);
    MakeOn(&fs, "bf16");
    ASSERT_TRUE(TagNow("a", 1).ok());
    const ServedWeights old = Look();
    ChangeAll(9);
    fs.FailAt(fs.calls() + call, absl::ResourceExhaustedError("the disk is full"), 4096);
    const auto replaced = TagNow("a", 2, /*replace=*/true);
    EXPECT_EQ(*Read(Named("a")), replaced.ok() ? Look() : old);
    if (!replaced.ok()) {
      EXPECT_EQ(replaced.status().code(), absl::StatusCode::kResourceExhausted);
      EXPECT_THAT(std::string(replaced.status().message()), HasSubstr("the disk is full"));
      EXPECT_THAT(fs.Dump(), ::testing::Not(HasSubstr(".part")));
      ASSERT_TRUE(TagNow("a", 2, /*replace=*/true).ok()) << "once there is room";
    }
    LetGo();
    if (call == 40) break;  // past all of them
  }
}

// The disk has done neither when the strand hears of both.
TEST_F(TagsOnDiskTest, WhoReadsANameWhileItIsGivenToAnotherVersionGetsThatOne) {
  MakeRoot(&fs_);
  MakeOn(&fs_, "bf16");
  ASSERT_TRUE(TagNow("a", 1).ok());
  ChangeAll(9);
  ASSERT_TRUE(TagNow("b", 2).ok());
  const auto reader = MakeReader({.version = Named("a")});
  OnStrand([&] {
    followers_->Tag({.order = {.name = "a", .replace = true}, .version = Named("b")},
                    [](const absl::StatusOr<TagKeeper::Tagged>& answer) { EXPECT_TRUE(answer.ok()); });
    followers_->Begin({.version = Named("a")}, reader);
  });
  ASSERT_TRUE(reader->AwaitEnd());
  ASSERT_TRUE(reader->ended()->ok()) << *reader->ended();
  EXPECT_EQ(reader->weights(), Look());
}

TEST_F(TagsOnDiskTest, WhoReadsANameWhileItIsTakenAwayIsToldSo) {
  MakeRoot(&fs_);
  MakeOn(&fs_, "bf16");
  ASSERT_TRUE(TagNow("a", 1).ok());
  const auto reader = MakeReader({.version = Named("a")});
  OnStrand([&] {
    followers_->Untag("a", [](const absl::Status& s) { EXPECT_TRUE(s.ok()); });
    followers_->Begin({.version = Named("a")}, reader);
  });
  ASSERT_TRUE(reader->AwaitEnd());
  EXPECT_EQ(reader->ended()->code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(reader->ended()->message()), HasSubstr("run 'r1' has no version of the name 'a'"));
}

TEST_F(TagsOnDiskTest, NothingDamagedIsGivenOut) {
  MakeRoot(&fs_);
  MakeOn(&fs_, "int8-row");
  ASSERT_TRUE(TagNow("good", 5).ok());
  const std::string file = FileOf("good"), content = fs_.Content(file);
  std::mt19937_64 random(7);
  for (int k = 0; k < 60; ++k) {
    fs_.SetContent(file, content);
    StartAgain(&fs_);
    // Half of them in the header, which is a small part.
    const uint64_t byte = k % 2 == 0 ? random() % 4096 : random() % content.size();
    fs_.Flip(file, byte, static_cast<int>(random() % 8));
    const auto read = Read(Named("good"));
    EXPECT_EQ(read.status().code(), absl::StatusCode::kDataLoss) << byte << ": " << read.status();
    EXPECT_THAT(std::string(read.status().message()), HasSubstr("is damaged"));
  }
  fs_.SetContent(file, content);
  fs_.Truncate(file, content.size() - 1);
  StartAgain(&fs_);
  EXPECT_THAT(Tags()[0].unreadable, HasSubstr("is damaged"));
  EXPECT_EQ(Read(Named("good")).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(Untag("good").ok()) << "and it can be let go";
  EXPECT_TRUE(Tags().empty());
}

TEST_F(TagsOnDiskTest, ThePlanHasRoomForOneThatIsWrittenAndForWhoReads) {
  MakeRoot(&fs_);
  MakeOn(&fs_, "bf16");
  RunSpec without = spec_;
  without.follow->tags = 0;
  const Plan plan = MakePlan(spec_);
  EXPECT_EQ(plan.bytes.following, MakePlan(without).bytes.following + VersionBytes(spec_, plan) +
                                      spec_.follow->readers * (VersionMessageBytes(plan) + kStoredReadBytes));
}

TEST_F(TagsOnDiskTest, AVersionOfAnotherSpecIsShownAndNotRead) {
  MakeRoot(&fs_);
  MakeOn(&fs_, "bf16");
  ASSERT_TRUE(TagNow("good", 5).ok());
  LetGo();
  MakeOn(&fs_, "fp16");
  ASSERT_EQ(Tags().size(), 1u);
  EXPECT_THAT(Tags()[0].unreadable, HasSubstr("is of another spec than run 'r1' has now"));
  EXPECT_THAT(std::string(Read(Named("good")).status().message()), HasSubstr("any safetensors reader reads it"));
}

TEST_F(TagsOnDiskTest, ARunThatEndsWhileOneIsWrittenAnswersAndLeavesNothing) {
  MakeRoot(&fs_);
  MakeOn(&fs_, "bf16");
  const CallPtr call = BeginTag("good");
  ASSERT_TRUE(Close(1));
  Encode();
  AwaitMade(1);
  OnStrand([&] {
    followers_->End(absl::NotFoundError("deleted"));
    store_->set_before_change(nullptr);
    followers_.reset();
  });
  const auto answer = Await(call);
  EXPECT_TRUE(answer.ok() || answer.status().message() == "deleted") << answer.status();
  EXPECT_THAT(fs_.Dump(), ::testing::Not(HasSubstr(".part")));
}

TEST_F(TagsOnDiskTest, TheFolderGoesWithItsFilesAndNothingElse) {
  MakeRoot(&fs_);
  MakeOn(&fs_, "bf16");
  ASSERT_TRUE(TagNow("good", 5).ok());
  ASSERT_TRUE(fs_.Create("/r/tags/mine.txt").ok());
  EXPECT_THAT(std::string(RemoveTags(&fs_, "/r/tags").message()), HasSubstr("mine.txt in it is no version"));
  ASSERT_TRUE(fs_.RemoveFile("/r/tags/mine.txt").ok());
  EXPECT_TRUE(RemoveTags(&fs_, "/r/tags").ok());
  EXPECT_FALSE(fs_.Exists("/r/tags"));
}

TEST(TagFilesTest, NamesAreToldFromOthers) {
  for (const char* name : {"a", "good", "v1.2-rc.3", "0"}) EXPECT_TRUE(IsTagName(name)) << name;
  for (const char* name : {"", ".a", "a.", "-a", "A", "a/b", "a b", "ä", "..", "a_b"}) {
    EXPECT_FALSE(IsTagName(name)) << name;
  }
  EXPECT_FALSE(IsTagName(std::string(65, 'a')));
  const auto file = ParseTagFile("v1.2.7.safetensors");
  ASSERT_TRUE(file);
  EXPECT_EQ(file->tag, "v1.2");
  EXPECT_EQ(file->number, 7u);
  EXPECT_FALSE(ParseTagFile("good.7.part")->whole);
  for (const char* name :
       {"good.safetensors", "good.07.safetensors", ".7.safetensors", "good.7.bin", "7.safetensors"}) {
    EXPECT_FALSE(ParseTagFile(name)) << name;
  }
}

}  // namespace
}  // namespace ballast
