// Checkpoints on a disk that fails, fills up and loses its power: what was acknowledged is there, whole, and nothing that
// is damaged is taken for a checkpoint.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

#include "server/storage/checkpoint_reader.h"
#include "server/storage/checkpoint_writer.h"
#include "server/storage/storage.h"
#include "tests/server/storage/model_fs.h"

namespace ballast {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

constexpr char kRunsRun[] = "/d/runs/r";

// What the files of a step hold; one is longer than a buffer, and ends nowhere in particular.
struct StepFiles {
  explicit StepFiles(uint64_t of_step) : step(of_step) {
    std::mt19937_64 random(step);
    for (const auto& [name, bytes] : std::vector<std::pair<std::string, size_t>>{
             {"model-00001-of-00001.safetensors", 5000}, {"run.json", 700}, {"spec.json", 90}}) {
      std::string content(bytes, '\0');
      for (char& c : content) c = static_cast<char>(random());
      files[name] = content;
    }
  }
  CheckpointContent Content() const {
    CheckpointContent content;
    for (const auto& [name, bytes] : files) {
      const absl::Span<const std::byte> all(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
      content.files.push_back({.name = name, .pieces = {all.first(bytes.size() / 3), all.subspan(bytes.size() / 3)}});
    }
    return content;
  }
  uint64_t step;
  std::map<std::string, std::string> files;
};

void MakeRoot(ModelFs* fs) {
  ASSERT_TRUE(fs->MakeFolder("/d").ok());
  ASSERT_TRUE(fs->SyncFolder("").ok());
}

// Opens the storage as a daemon does, writes the steps, and closes it. The status of the last write.
absl::Status WriteSteps(ModelFs* fs, const std::vector<uint64_t>& steps) {
  auto storage = Storage::Open({.fs = fs, .dir = "/d", .threads = 1});
  if (!storage.ok()) return storage.status();
  auto folder = (*storage)->FolderOf("r");
  if (!folder.ok()) return folder.status();
  CheckpointWriter writer({.fs = fs, .threads = (*storage)->threads(), .rate = (*storage)->rate()});
  absl::Status status;
  for (const uint64_t step : steps) {
    const StepFiles files(step);
    absl::Notification written;
    writer.Write({.folder = *folder,
                  .run_id = "r",
                  .spec_sha256 = "spec",
                  .step = step,
                  .content = [&] { return files.Content(); },
                  .retain = 2},
                 [&](const absl::StatusOr<CheckpointWritten>& result) {
                   status = result.status();
                   written.Notify();
                 });
    written.WaitForNotification();
    if (!status.ok()) return status;
  }
  return status;
}

// All of a checkpoint, compared with what was written.
absl::Status ReadWhole(ModelFs* fs, const std::string& folder) {
  const auto checkpoint = CheckpointReader::Open(fs, folder);
  if (!checkpoint.ok()) return checkpoint.status();
  static const auto* const buffer = new DiskBuffer;
  const StepFiles wanted(checkpoint->manifest().step());
  for (const v1::CheckpointFile& file : checkpoint->manifest().files()) {
    std::string content(file.bytes(), '\0');
    const absl::Span<std::byte> all(reinterpret_cast<std::byte*>(content.data()), content.size());
    if (auto s = checkpoint->ReadInto(file.name(), {all}, *buffer); !s.ok()) return s;
    EXPECT_TRUE(content == wanted.files.at(file.name())) << folder << "/" << file.name() << " was loaded damaged";
  }
  return absl::OkStatus();
}

std::vector<CheckpointEntry> KeptIn(ModelFs* fs) {
  std::vector<CheckpointEntry> kept;
  const auto entries = fs->List(kRunsRun);
  if (!entries.ok()) return kept;
  for (const Fs::Entry& entry : *entries) {
    const auto parsed = ParseCheckpointName(entry.name);
    if (parsed && parsed->state == CheckpointState::kKept) kept.push_back(*parsed);
  }
  return kept;
}

// Why the folder does not hold what it must; empty: it does. `acknowledged`: the last step that was; 0: none.
std::string WrongAfterCut(ModelFs* fs, uint64_t acknowledged) {
  uint64_t newest = 0;
  for (const CheckpointEntry& entry : KeptIn(fs)) {
    if (auto s = ReadWhole(fs, absl::StrCat(kRunsRun, "/", entry.name)); !s.ok()) {
      return absl::StrCat(entry.name, " counts, and: ", s.ToString());
    }
    newest = entry.place.step;
  }
  if (newest < acknowledged) return absl::StrCat("step ", acknowledged, " was acknowledged; the newest is ", newest);
  // And a daemon goes on from there.
  if (auto s = WriteSteps(fs, {90, 91, 92}); !s.ok()) return s.ToString();
  if (fs->List(kRunsRun)->size() != 2) return "something is left over";
  return "";
}

TEST(CheckpointFilesTest, AreThereWholeOrNotAtAllWhereverThePowerIsCut) {
  ModelFs whole;
  MakeRoot(&whole);
  ASSERT_TRUE(WriteSteps(&whole, {1, 2}).ok());
  const int before = whole.calls();
  ASSERT_TRUE(WriteSteps(&whole, {3}).ok());
  const int after = whole.calls();
  for (int cut = before + 1; cut <= after + 1; ++cut) {
    ModelFs fs;
    MakeRoot(&fs);
    ASSERT_TRUE(WriteSteps(&fs, {1, 2}).ok());
    fs.CutAt(cut);
    const bool written = WriteSteps(&fs, {3}).ok();
    for (uint64_t seed = 0; seed < 40; ++seed) {
      const auto left = fs.AfterCut(seed);
      ASSERT_EQ(WrongAfterCut(left.get(), written ? 3 : 2), "") << "cut at " << fs.log()[cut - 1] << ", seed " << seed;
    }
  }
}

// Writes one step after another, each by a daemon of its own; the last that was acknowledged.
uint64_t WriteOneByOne(ModelFs* fs, const std::vector<uint64_t>& steps) {
  uint64_t acknowledged = 0;
  for (const uint64_t step : steps) {
    if (WriteSteps(fs, {step}).ok()) acknowledged = step;
  }
  return acknowledged;
}

// Whether some power cut at the call or soon after it leaves what it must not, if the call does nothing.
bool IsMissed(int call) {
  constexpr int kSoon = 30;  // calls: the rest of the checkpoint, and some of the next
  for (int cut = call + kSoon; cut > call; --cut) {
    ModelFs fs;
    MakeRoot(&fs);
    fs.SkipAt(call);
    fs.CutAt(cut);
    const uint64_t acknowledged = WriteOneByOne(&fs, {1, 2, 3});
    for (uint64_t seed = 0; seed < 12; ++seed) {
      if (!WrongAfterCut(fs.AfterCut(seed).get(), acknowledged).empty()) return true;
    }
  }
  return false;
}

TEST(CheckpointFilesTest, EachSyncIsNeeded) {
  ModelFs whole;
  MakeRoot(&whole);
  const int before = whole.calls();
  ASSERT_EQ(WriteOneByOne(&whole, {1, 2, 3}), 3u);
  const std::vector<std::string> log = whole.log();
  int syncs = 0;
  for (int call = before + 1; call <= static_cast<int>(log.size()); ++call) {
    const std::string& what = log[static_cast<size_t>(call) - 1];
    // A folder that was there is synced again when it is opened, for the daemon that made it may not have come to that.
    if (!absl::StrContains(what, "sync ") || what == "sync /d" || what == "sync /d/runs") continue;
    ++syncs;
    EXPECT_TRUE(IsMissed(call)) << "nobody would notice without: " << what;
  }
  EXPECT_GE(syncs, 3 * 7);
}

TEST(CheckpointFilesTest, ACallThatFailsLosesNothingAndIsToldAndTheNextOneIsWritten) {
  ModelFs whole;
  MakeRoot(&whole);
  ASSERT_TRUE(WriteSteps(&whole, {1, 2}).ok());
  const int before = whole.calls();
  ASSERT_TRUE(WriteSteps(&whole, {3}).ok());
  const int after = whole.calls();
  for (const absl::Status& how :
       {absl::ResourceExhaustedError("disk full"), absl::DataLossError("input/output error")}) {
    for (int call = before + 1; call <= after; ++call) {
      ModelFs fs;
      MakeRoot(&fs);
      ASSERT_TRUE(WriteSteps(&fs, {1, 2}).ok());
      fs.FailAt(call, how);
      const absl::Status status = WriteSteps(&fs, {3});
      const std::string failed = fs.log()[static_cast<size_t>(call) - 1];
      // What comes after publishing may fail without harm: removing the oldest.
      EXPECT_TRUE(status.ok() || status.code() == how.code()) << failed << ": " << status;
      EXPECT_EQ(WrongAfterCut(fs.AfterCut(0).get(), status.ok() ? 3 : 2), "") << failed;
      EXPECT_TRUE(WriteSteps(&fs, {4}).ok()) << failed;
      EXPECT_EQ(KeptIn(&fs).back().place.step, 4u) << failed;
    }
  }
}

TEST(CheckpointFilesTest, AFullDiskIsToldAndWhatIsThereStays) {
  ModelFs fs;
  MakeRoot(&fs);
  ASSERT_TRUE(WriteSteps(&fs, {1, 2}).ok());
  fs.set_capacity(2 * 7000 + 5000);
  EXPECT_TRUE(absl::IsResourceExhausted(WriteSteps(&fs, {3})));
  EXPECT_EQ(KeptIn(&fs).size(), 2u);
  EXPECT_EQ(fs.List(kRunsRun)->size(), 2u) << "what was begun is removed, and frees the disk";
}

class DamageTest : public testing::Test {
 protected:
  void SetUp() override {
    MakeRoot(&fs_);
    ASSERT_TRUE(WriteSteps(&fs_, {1}).ok());
    folder_ = absl::StrCat(kRunsRun, "/", KeptIn(&fs_).front().name);
    ASSERT_TRUE(ReadWhole(&fs_, folder_).ok());
  }
  // With the file's content changed so, for a moment.
  absl::Status ReadWith(const std::string& name, const std::string& content) {
    const std::string path = absl::StrCat(folder_, "/", name), was = fs_.Content(path);
    fs_.SetContent(path, content);
    const absl::Status status = ReadWhole(&fs_, folder_);
    fs_.SetContent(path, was);
    return status;
  }
  std::string Content(const std::string& name) { return fs_.Content(absl::StrCat(folder_, "/", name)); }
  std::vector<std::string> Names() {
    const auto entries = fs_.List(folder_);
    std::vector<std::string> names;
    for (const Fs::Entry& entry : *entries) names.push_back(entry.name);
    return names;
  }

  ModelFs fs_;
  std::string folder_;
};

TEST_F(DamageTest, EveryBitOfTheManifestAndOfItsSumsIsChecked) {
  for (const std::string name : {"manifest.json", "SHA256SUMS"}) {
    const std::string whole = Content(name);
    for (size_t bit = 0; bit < 8 * whole.size(); ++bit) {
      std::string damaged = whole;
      damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
      const absl::Status status = ReadWith(name, damaged);
      ASSERT_TRUE(absl::IsDataLoss(status)) << name << " bit " << bit << ": " << status;
      ASSERT_THAT(std::string(status.message()), HasSubstr(name));
    }
  }
}

TEST_F(DamageTest, AnyFileThatIsCutIsNamed) {
  for (const std::string& name : Names()) {
    const std::string whole = Content(name);
    for (size_t bytes = 0; bytes < whole.size(); bytes += 512) {
      const absl::Status status = ReadWith(name, whole.substr(0, bytes));
      ASSERT_TRUE(absl::IsDataLoss(status)) << name << " cut to " << bytes << ": " << status;
      ASSERT_THAT(std::string(status.message()), HasSubstr(name));
    }
    ASSERT_TRUE(absl::IsDataLoss(ReadWith(name, whole + "x"))) << name;
  }
}

TEST_F(DamageTest, FlipsInDataAreFound) {
  std::mt19937_64 random(7);
  const std::string name = "model-00001-of-00001.safetensors", whole = Content(name);
  for (int flip = 0; flip < 10000; ++flip) {
    std::string damaged = whole;
    const size_t bit = random() % (8 * whole.size());
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    const absl::Status status = ReadWith(name, damaged);
    ASSERT_TRUE(absl::IsDataLoss(status)) << bit;
    ASSERT_THAT(std::string(status.message()), HasSubstr("MiB 0 of it"));
  }
}

TEST_F(DamageTest, AMissingFileIsNamed) {
  for (const std::string& name : Names()) {
    ModelFs fs;
    MakeRoot(&fs);
    ASSERT_TRUE(WriteSteps(&fs, {1}).ok());
    ASSERT_TRUE(fs.RemoveFile(absl::StrCat(folder_, "/", name)).ok());
    const absl::Status status = ReadWhole(&fs, folder_);
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(name), HasSubstr("it is missing")));
  }
}

TEST(RunFolderTest, NamesThatAreNotACheckpointsAreNoCheckpoints) {
  for (const char* name : {"", "7-step-1", "000000000007-step-", "000000000007-step-1x", "000000000007-step-01",
                           "writing-", "copy-000000000007-step-1", "000000000007-step-1/..", "-00000000007-step-1"}) {
    EXPECT_FALSE(ParseCheckpointName(name)) << name;
  }
  for (const char* name :
       {"000000000007-step-120", "writing-000000000007-step-0", "discarded-123456789012345-step-9"}) {
    const auto entry = ParseCheckpointName(name);
    ASSERT_TRUE(entry) << name;
    EXPECT_EQ(entry->name, name);
  }
}

TEST(RunFolderTest, StepsThatWereUndoneAreSetAsideAndGoWithTheOldest) {
  ModelFs fs;
  MakeRoot(&fs);
  ASSERT_TRUE(WriteSteps(&fs, {10, 20}).ok());
  auto folder = RunFolder::Open(&fs, "/d/runs", "r");
  ASSERT_TRUE(folder.ok());
  EXPECT_EQ(*folder->SetAside(10), 10u);
  EXPECT_EQ(folder->List()->back().name, "discarded-000000000002-step-20");
  EXPECT_EQ(*folder->NextNumber(), 3u) << "a number is never used twice";
  ASSERT_TRUE(WriteSteps(&fs, {15}).ok());
  EXPECT_EQ(folder->List()->size(), 3u) << "one of the two that are kept is older than the one set aside";
  ASSERT_TRUE(WriteSteps(&fs, {18}).ok());
  const auto entries = folder->List();
  std::vector<std::string> names;
  for (const CheckpointEntry& entry : *entries) names.push_back(entry.name);
  EXPECT_THAT(names, testing::ElementsAre("000000000003-step-15", "000000000004-step-18"));
}

TEST(RunFolderTest, ARemovedRunIsGoneAtOnceWhereverThePowerIsCut) {
  ModelFs whole;
  MakeRoot(&whole);
  ASSERT_TRUE(WriteSteps(&whole, {1, 2}).ok());
  for (int cut = 1;; ++cut) {
    ModelFs fs;
    MakeRoot(&fs);
    ASSERT_TRUE(WriteSteps(&fs, {1, 2}).ok());
    auto folder = RunFolder::Open(&fs, "/d/runs", "r");
    ASSERT_TRUE(folder.ok());
    fs.CutAt(fs.calls() + cut);
    const bool removed = folder->RemoveAll().ok();
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const auto left = fs.AfterCut(seed);
      const size_t kept = KeptIn(left.get()).size();
      ASSERT_THAT(kept, AnyOf(0u, 2u)) << "cut " << cut;
      ASSERT_TRUE(!removed || kept == 0) << "cut " << cut;
      const auto storage = Storage::Open({.fs = left.get(), .dir = "/d", .threads = 1});
      ASSERT_TRUE(storage.ok());
      ASSERT_EQ((*storage)->RunIds()->size(), kept == 0 ? 0u : 1u);
    }
    if (removed) break;
  }
}

TEST(RunFolderTest, AFolderWithSomethingOfAnothersIsNotRemoved) {
  ModelFs fs;
  MakeRoot(&fs);
  ASSERT_TRUE(WriteSteps(&fs, {1}).ok());
  ASSERT_TRUE(fs.MakeFolder("/d/runs/r/mine").ok());
  auto folder = RunFolder::Open(&fs, "/d/runs", "r");
  ASSERT_TRUE(folder.ok());
  EXPECT_THAT(std::string(folder->RemoveAll().message()), HasSubstr("mine in it is no checkpoint"));
  EXPECT_EQ(KeptIn(&fs).size(), 1u);
}

TEST(StorageTest, IsOneDaemonsAlone) {
  ModelFs fs;
  MakeRoot(&fs);
  const auto first = Storage::Open({.fs = &fs, .dir = "/d", .threads = 1});
  ASSERT_TRUE(first.ok());
  EXPECT_TRUE(absl::IsUnavailable(Storage::Open({.fs = &fs, .dir = "/d", .threads = 1}).status()));
  EXPECT_TRUE(absl::IsNotFound(Storage::Open({.fs = &fs, .dir = "/nowhere", .threads = 1}).status()));
}

TEST(FileWriterTest, WritesWhatTheBufferHoldsManyTimesOver) {
  ModelFs fs;
  MakeRoot(&fs);
  const DiskBuffer buffer;
  std::string content(3 * DiskBuffer::kBytes + 12345, '\0');
  std::mt19937_64 random(3);
  for (char& c : content) c = static_cast<char>(random());
  const absl::Span<const std::byte> all(reinterpret_cast<const std::byte*>(content.data()), content.size());
  std::vector<absl::Span<const std::byte>> pieces;
  for (size_t at = 0; at < all.size(); at += 1000003) pieces.push_back(all.subspan(at, 1000003));
  const auto entry = WriteFile(&fs, "/d", {"a", pieces}, buffer, [](uint64_t) { return absl::OkStatus(); });
  ASSERT_TRUE(entry.ok());
  EXPECT_TRUE(fs.Content("/d/a") == content);
  EXPECT_EQ(entry->bytes(), content.size());
  EXPECT_EQ(entry->crc32c_size(), 13);
}

TEST(RateLimitTest, HoldsToTheRateAndLetsGoWhenItIsStopped) {
  RateLimit none(0);
  EXPECT_TRUE(none.Take(uint64_t{1} << 40));
  RateLimit slow(1);  // a byte a second
  EXPECT_TRUE(slow.Take(1000)) << "the first waits for nobody";
  slow.Stop();
  EXPECT_FALSE(slow.Take(1));
}

}  // namespace
}  // namespace ballast
