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
#include "server/storage/damage.h"
#include "server/storage/storage.h"
#include "tests/server/storage/model_fs.h"
#include "tests/server/storage/written_steps.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using testing::KeptIn;
using testing::kRunsRun;
using testing::MakeRoot;
using testing::StepFiles;
using testing::WriteSteps;

// All of a checkpoint, compared with what was written.
absl::Status ReadWhole(ModelFs* fs, const std::string& folder) {
  const auto checkpoint = CheckpointReader::Open(fs, folder);
  if (!checkpoint.ok()) return checkpoint.status();
  static const auto* const buffer = new DiskBuffer;
  const StepFiles wanted(checkpoint->manifest().step());
  for (const v1::CheckpointFile& file : checkpoint->manifest().files()) {
    std::string content(file.bytes(), '\0');
    const absl::Span<std::byte> all(reinterpret_cast<std::byte*>(content.data()), content.size());
    const auto reader = checkpoint->OpenFile(file.name(), {all});
    if (!reader.ok()) return reader.status();
    for (size_t block = 0; block < reader->blocks(); ++block) {
      if (auto s = reader->Read(block, *buffer); !s.ok()) return s;
    }
    EXPECT_TRUE(content == wanted.files.at(file.name())) << folder << "/" << file.name() << " was loaded damaged";
  }
  return absl::OkStatus();
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
    for (uint64_t seed = 0; seed < 16; ++seed) {
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

class DamageTest : public ::testing::Test {
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
      ASSERT_TRUE(absl::IsDataLoss(status) && DamageOf(status) == "manifest") << name << " " << bit << ": " << status;
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
      ASSERT_EQ(DamageOf(status), name == "manifest.json" || name == "SHA256SUMS" ? "manifest" : "truncated") << name;
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
    ASSERT_TRUE(absl::IsDataLoss(status) && DamageOf(status) == "checksum") << bit << ": " << status;
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
    EXPECT_TRUE(absl::IsDataLoss(status) && DamageOf(status) == "missing") << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(name), HasSubstr("it is missing")));
  }
}

}  // namespace
}  // namespace ballast
