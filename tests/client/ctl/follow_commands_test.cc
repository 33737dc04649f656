// What ballastctl makes of a run that it follows, and of the files that come of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "proto/checkpoint/safetensors_header.h"

#include "client/cpp/ctl/command_line.h"
#include "client/cpp/ctl/followed_files.h"
#include "client/cpp/ctl/safetensors_file.h"
#include "tests/client/follow/fake_follow_service.h"
#include "tests/server/storage/temporary_folder.h"

namespace ballast::ctl {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

namespace fs = std::filesystem;

struct Heard {
  int code = 0;
  std::string out, err;
};

class FollowCommandsTest : public ::testing::Test {
 protected:
  Heard Say(const std::vector<std::string>& words) const {
    std::ostringstream out, err;
    const auto environment = [&](const std::string& name) {
      return name == "BALLAST_SERVER" ? std::optional<std::string>(daemon_.address()) : std::nullopt;
    };
    const int code = Main(words, environment, out, err);
    return {code, out.str(), err.str()};
  }
  std::vector<std::string> Files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }
  std::string DataOf(const std::string& name, const std::string& tensor) const {
    const auto file = SafetensorsFile::Open(Path(name));
    EXPECT_TRUE(file.ok()) << file.status();
    const FileTensor& found = file->tensors().at(tensor);
    std::string data(found.end - found.begin, '\0');
    EXPECT_TRUE(file->Read(found.begin, absl::MakeSpan(reinterpret_cast<std::byte*>(data.data()), data.size())).ok());
    return data;
  }
  std::string Path(const std::string& name) const { return (folder_ / name).string(); }
  // A file of one tensor.
  std::string Write(const std::string& name, const std::string& dtype, const std::string& bytes,
                    const std::string& tensor = "w") const {
    fs::create_directories(folder_);
    SafetensorsHeader header;
    header.Add(tensor, dtype, std::vector<uint64_t>{bytes.size() / DtypeBytes(dtype)}, bytes.size());
    std::ofstream(Path(name)) << std::move(header).Finish() << bytes;
    return Path(name);
  }
  template <typename T>
  std::string WriteFloats(const std::string& name, std::vector<T> values) const {
    std::string bytes(values.size() * sizeof(T), '\0');
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return Write(name, sizeof(T) == 4 ? "F32" : "BF16", bytes);
  }

  FakeFollowService daemon_;
  const ballast::testing::TemporaryFolder temporary_;
  const fs::path folder_ = fs::path(temporary_.path()) / "followed";  // which ballastctl makes
  const FollowedRun first_{kFollowedSpec, 7}, second_ = first_.Next(), third_ = second_.Next();
};

TEST_F(FollowCommandsTest, EachVersionBecomesAFileAndALine) {
  daemon_.Say(first_.Whole());
  daemon_.Say(second_.ChangesOf(first_));
  daemon_.Say(third_.ChangesOf(second_));
  const Heard heard = Say({"follow", "r", "--out", folder_.string(), "--versions", "3", "--every=1"});
  EXPECT_EQ(heard.code, kOk) << heard.err;
  EXPECT_THAT(heard.out, ContainsRegex("STEP +CHANGED +RECEIVED +OF +BEHIND +FILE\n +7 +100.000 % "));
  EXPECT_THAT(heard.out, ContainsRegex("\n +8 +13.953 % +[0-9]+ B +113 B +[0-9]+ d [0-9]+ h +.*step-8.safetensors\n"));
  EXPECT_THAT(Files(), ElementsAre("step-8.safetensors", "step-9.safetensors")) << "the newest two";
  EXPECT_EQ(daemon_.AwaitRequests(1)[0].every(), 1u);
  const auto file = SafetensorsFile::Open(Path("step-9.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->metadata(),
            (std::map<std::string, std::string>{{"format", "pt"}, {"generation", "1"}, {"run", "r"}, {"step", "9"}}));
  EXPECT_EQ(file->tensors().size(), 6u);
  const FileTensor d = file->tensors().at("d"), e = file->tensors().at("e");
  EXPECT_EQ(d.dtype, "BF16");
  EXPECT_THAT(d.shape, ElementsAre(2, 3));
  EXPECT_EQ(e.dtype, "F32") << "decoded to its dtype";
  std::string bytes(12, '\0');
  ASSERT_TRUE(file->Read(d.begin, absl::MakeSpan(reinterpret_cast<std::byte*>(bytes.data()), 12)).ok());
  EXPECT_EQ(bytes, third_.codes[3]);
  EXPECT_TRUE(file->tensors().at("c").shape.empty());
}

TEST_F(FollowCommandsTest, ARewoundRunsOldFileGoesAndOthersFilesStay) {
  FollowedRun rewound(kFollowedSpec, 3);
  rewound.generation = 2;
  Write("step-1.safetensors", "F32", "1234");  // not of the run
  daemon_.Say(first_.Whole());
  daemon_.Say(rewound.Whole());
  const Heard heard = Say({"follow", "r", "--out", folder_.string(), "--versions=2", "--retain=1", "--json"});
  EXPECT_EQ(heard.code, kOk) << heard.err;
  EXPECT_THAT(Files(), ElementsAre("step-1.safetensors", "step-3.safetensors"));
  EXPECT_THAT(heard.out, AllOf(HasSubstr("\"step\":3"), HasSubstr("\"generation\":2"), Not(HasSubstr("STEP"))));
  EXPECT_EQ(std::count(heard.out.begin(), heard.out.end(), '\n'), 2);
}

TEST_F(FollowCommandsTest, PartsThatAnEndedProcessLeftAreRemoved) {
  const pid_t gone = fork();
  if (gone == 0) _exit(0);
  ASSERT_EQ(waitpid(gone, nullptr, 0), gone);
  fs::create_directories(folder_);
  const auto part = [&](const std::string& of) {
    std::ofstream(folder_ / absl::StrCat(".step-3.", of, ".part")) << "half";
    return Path(absl::StrCat(".step-3.", of, ".part"));
  };
  part(absl::StrCat(gone));
  part(absl::StrCat("changes.", getpid()));  // of an earlier process of this number
  part(absl::StrCat(getppid()));
  part("text");
  // Of one that this process does not see, in another container.
  const int locked = open(part(absl::StrCat("changes.", gone)).c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(flock(locked, LOCK_EX), 0);
  daemon_.Say(first_.Whole());
  const Heard heard = Say({"follow", "r", "--out", folder_.string(), "--versions=1"});
  close(locked);
  EXPECT_EQ(heard.code, kOk) << heard.err;
  EXPECT_THAT(Files(), UnorderedElementsAre(absl::StrCat(".step-3.changes.", gone, ".part"),
                                            absl::StrCat(".step-3.", getppid(), ".part"), ".step-3.text.part",
                                            "step-7.safetensors"));
}

// A subscriber of one tensor, in whose reading the process is sent a signal.
class SignalledReader : public Subscriber {
 public:
  explicit SignalledReader(int signal) : signal_(signal) {
    v1::TensorSpec& tensor = *spec_.add_tensors();
    tensor.set_name("w");
    tensor.set_dtype("fp32");
    tensor.add_shape(2);
  }
  absl::StatusOr<std::optional<FollowedVersion>> Next(double) override { return std::nullopt; }
  bool Await(double) override { return false; }
  const v1::RunSpec& spec() const override { return spec_; }
  bool readable() const override { return true; }
  absl::StatusOr<FollowedTensor> Served(uint32_t) const override { return FollowedTensor{}; }
  absl::Status Read(uint32_t, absl::Span<std::byte>) const override {
    raise(signal_);
    return absl::OkStatus();
  }
  absl::StatusOr<uint64_t> CountChanged(uint32_t) const override { return 0; }
  absl::Status ReadChanged(uint32_t, absl::Span<int64_t>, absl::Span<std::byte>) const override {
    return absl::OkStatus();
  }
  absl::Status Rollback(const std::string&) override { return absl::OkStatus(); }
  void Resume() override {}
  void Close() override {}

 private:
  const int signal_;
  v1::RunSpec spec_;
};

TEST_F(FollowCommandsTest, ASignalInTheMiddleOfAFileLeavesNoPartOfIt) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const pid_t child = fork();
    if (child == 0) {
      auto files = FollowedFiles::Open(folder_.string(), "r", {});
      _exit(files.ok() && files->Write(SignalledReader(signal), {.step = 1}).ok() ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal) << status;
    EXPECT_THAT(Files(), ::testing::IsEmpty());
  }
}

TEST_F(FollowCommandsTest, FilesOfChangesMakeEachVersionOfTheOneBefore) {
  FollowedRun run(kFollowedSpec, 10);
  daemon_.Say(run.Whole());
  for (int i = 0; i < 6; ++i) {
    const FollowedRun before = std::exchange(run, run.Next());
    daemon_.Say(run.ChangesOf(before));
  }
  const Heard heard =
      Say({"follow", "r", "--out", folder_.string(), "--versions=7", "--changes=2", "--retain=2", "--every=1"});
  EXPECT_EQ(heard.code, kOk) << heard.err;
  EXPECT_THAT(Files(), ElementsAre("step-13.safetensors", "step-14.changes.safetensors", "step-15.changes.safetensors",
                                   "step-16.safetensors"));
  std::string d = DataOf("step-13.safetensors", "d");
  for (const char* name : {"step-14.changes.safetensors", "step-15.changes.safetensors"}) {
    const std::string indices = DataOf(name, "d.indices"), values = DataOf(name, "d.values");
    ASSERT_EQ(indices.size(), 8u) << "one element has changed";
    int64_t at = 0;
    std::memcpy(&at, indices.data(), 8);
    d.replace(static_cast<size_t>(at) * 2, 2, values);
  }
  const auto last = SafetensorsFile::Open(Path("step-15.changes.safetensors"));
  EXPECT_EQ(last->metadata().at("base_step"), "14");
  EXPECT_EQ(last->metadata().at("base_generation"), "1");
  EXPECT_EQ(last->tensors().at("d.values").dtype, "BF16");
  d[16 % d.size()] ^= 1;  // as FollowedRun::Next
  EXPECT_EQ(d, DataOf("step-16.safetensors", "d"));
}

TEST_F(FollowCommandsTest, AVersionThatComesWholeIsWrittenWhole) {
  daemon_.Say(first_.Whole());
  daemon_.Say(second_.Whole());
  const Heard heard = Say({"follow", "r", "--out", folder_.string(), "--versions=2", "--changes=5"});
  EXPECT_EQ(heard.code, kOk) << heard.err;
  EXPECT_THAT(Files(), ElementsAre("step-7.safetensors", "step-8.safetensors"));
}

TEST_F(FollowCommandsTest, WrongWordsAndFoldersAreNamed) {
  EXPECT_THAT(Say({"follow", "r"}).err, HasSubstr("follow wants --out DIR"));
  EXPECT_THAT(Say({"follow", "r", "--out", "x", "--every", "often"}).err, HasSubstr("--every is 'often'"));
  const Heard none = Say({"follow", "r", "--out", "x", "--retain", "0"});
  EXPECT_EQ(none.code, kUsage);
  EXPECT_THAT(none.err, AllOf(HasSubstr("--retain is 0"), HasSubstr("try `ballastctl follow --help`")));
  EXPECT_THAT(Say({"follow", "other", "--out", folder_.string()}).err, HasSubstr("no run 'other'"));
  EXPECT_THAT(Say({"follow", "other", "--out", folder_.string(), "--wait-for-run", ".01"}).err,
              AllOf(HasSubstr("no run 'other'"), HasSubstr("nor did that change within 0.01 s")));
  EXPECT_THAT(Say({"follow", "r", "--out", "x", "--wait-for-run", "-1"}).err, HasSubstr("--wait-for-run is '-1'"));
  EXPECT_THAT(Say({"follow", "r", "--out", "x", "--server", "a:1,a:1"}).err, HasSubstr("'a:1' is named twice"));
  EXPECT_EQ(Say({"follow", "r", "--out", "x", "--server", "127.0.0.1:1", "--timeout=0.05"}).code, kUnreachable);
  EXPECT_THAT(Say({"follow", "r", "--out", "x", "--tag", "t", "--format", "bf16"}).err,
              HasSubstr("leave out --format"));
  EXPECT_THAT(Say({"follow", "r", "--out", "x", "--format", "bf17"}).err, HasSubstr("in format 'bf17', which this"));
  EXPECT_THAT(Say({"follow", "r", "--out", "x", "--format", "bf16"}).err,
              HasSubstr("follow it as it is served; create"));
  std::ofstream(folder_.string()) << "a file";
  const Heard file = Say({"follow", "r", "--out", folder_.string()});
  EXPECT_EQ(file.code, kRefused);
  EXPECT_THAT(file.err, HasSubstr(folder_.string()));
}

TEST_F(FollowCommandsTest, ARunThatIsDeletedEndsIt) {
  daemon_.Say(first_.Whole());
  daemon_.End({grpc::StatusCode::NOT_FOUND, "run 'r' was deleted"});
  const Heard heard = Say({"follow", "r", "--out", folder_.string()});
  EXPECT_EQ(heard.code, kRefused);
  EXPECT_THAT(heard.err, HasSubstr("run 'r' was deleted"));
  EXPECT_THAT(Files(), ElementsAre("step-7.safetensors"));
}

TEST_F(FollowCommandsTest, DiffTellsInWhatFilesDiffer) {
  const std::string a = WriteFloats<float>("a", {1, 2, 3, 4}), b = WriteFloats<float>("b", {1, 2.5, 3, 3});
  const Heard heard = Say({"diff", a, b});
  EXPECT_EQ(heard.code, kRefused) << heard.err;
  EXPECT_THAT(heard.out, ContainsRegex("TENSOR +DIFFER +OF +LARGEST\nw +2 +4 +1\ntotal +2 +4 +1\n"));
  const Heard same = Say({"diff", a, a});
  EXPECT_EQ(same.code, kOk);
  EXPECT_EQ(same.out, "");
  EXPECT_THAT(Say({"diff", a, b, "--json"}).out, AllOf(HasSubstr("\"differing\": 2"), HasSubstr("\"total\"")));
  const std::string narrow = WriteFloats<uint16_t>("narrow", {0x3f80, 0x4000}),
                    other = WriteFloats<uint16_t>("other", {0x3f80, 0x7f80});
  EXPECT_THAT(Say({"diff", narrow, other}).out, ContainsRegex("w +1 +2 +inf\n"));
}

TEST_F(FollowCommandsTest, DiffNamesWhatCannotBeCompared) {
  const std::string a = WriteFloats<float>("a", {1, 2}), b = Write("b", "F32", "12345678", "v"),
                    c = Write("c", "BF16", "12345678");
  const Heard names = Say({"diff", a, b});
  EXPECT_EQ(names.code, kRefused);
  EXPECT_THAT(names.out, AllOf(HasSubstr("w: only in " + a), HasSubstr("v: only in " + b)));
  EXPECT_THAT(Say({"diff", a, c}).out, HasSubstr("w: F32 [2] in one, BF16 [4] in the other"));
  const std::string words = Write("words", "I32", "12345678"), others = Write("others", "I32", "12345679");
  EXPECT_THAT(Say({"diff", words, others}).out, ContainsRegex("w +1 +2 +-\n"));
}

TEST_F(FollowCommandsTest, DiffReadsNothingElse) {
  const std::string good = WriteFloats<float>("good", {1}), bad = Path("bad");
  const auto error = [&](const std::string& text) {
    std::ofstream(bad) << text;
    const Heard heard = Say({"diff", good, bad});
    EXPECT_EQ(heard.code, kUsage);
    EXPECT_THAT(heard.err, HasSubstr(bad));
    return heard.err;
  };
  const auto with_header = [](const std::string& json, const std::string& data) {
    std::string length(8, '\0');
    length[0] = static_cast<char>(json.size());
    return length + json + data;
  };
  EXPECT_THAT(error("short"), HasSubstr("it has 5 bytes"));
  EXPECT_THAT(error(std::string(8, '\x7f')), HasSubstr("its header is said to have"));
  EXPECT_THAT(error(with_header("[1]", "")), HasSubstr("its header is no JSON object"));
  for (const char* tensor :
       {R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}})", R"({"w":{"dtype":"F32","shape":[1]}})",
        R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", R"({"w":3})",
        R"({"w":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})",
        R"({"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}})"}) {
    EXPECT_THAT(error(with_header(tensor, "1234")), HasSubstr("its header has 'w' in no form")) << tensor;
  }
  EXPECT_THAT(Say({"diff", good, Path("none")}).err, HasSubstr("No such file"));
  EXPECT_THAT(Say({"diff", good, folder_.string()}).err, HasSubstr("it is no file"));
}

}  // namespace
}  // namespace ballast::ctl
