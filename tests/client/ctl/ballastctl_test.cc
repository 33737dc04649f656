// The program itself, against a real daemon: its exit codes and what it prints.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "tests/client/least_squares.h"
#include "tests/client/real_daemon.h"
#include "tests/eventually.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;

struct Answer {
  int code = 0;
  std::string text;  // both streams
};

class BallastctlTest : public ::testing::Test {
 protected:
  Answer Ballastctl(const std::string& words) const {
    const std::string command = absl::StrCat("BALLAST_SERVER=", daemon_.address(), " " BALLASTCTL " ", words, " 2>&1");
    FILE* pipe = popen(command.c_str(), "r");
    Answer answer;
    char buffer[4096];
    for (size_t n = 0; (n = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) answer.text.append(buffer, n);
    answer.code = WEXITSTATUS(pclose(pipe));
    return answer;
  }

  // Three steps of training; the trainer stays attached.
  void Train() {
    client_ = Client::Connect({.server = daemon_.address()}).value();
    ASSERT_TRUE(problem_.Join(*client_).ok());
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(problem_.Step(*client_).ok());
  }

  RealDaemon daemon_;
  LeastSquares problem_;
  std::unique_ptr<Client> client_;
};

TEST_F(BallastctlTest, StatusShowsVersionDeviceAndMemory) {
  const Answer answer = Ballastctl("status");
  EXPECT_EQ(answer.code, 0) << answer.text;
  EXPECT_THAT(answer.text, AllOf(HasSubstr("serving"), HasSubstr("cpu"), HasSubstr("of 1.00 GiB"),
                                 HasSubstr("http://" + daemon_.ops_address()), HasSubstr("companded8")));
}

TEST_F(BallastctlTest, StatusAsJson) {
  const Answer answer = Ballastctl("status --json");
  EXPECT_EQ(answer.code, 0);
  EXPECT_THAT(answer.text,
              AllOf(HasSubstr("\"memory_limit_bytes\": \"1073741824\""), HasSubstr("\"state\": \"serving\"")));
}

// Protobuf does not carry such text, and what the daemon says of a request that it cannot read is nothing.
TEST_F(BallastctlTest, WordsThatAreNotUtf8AreNamed) {
  for (const char* words :
       {"run $(printf 'a\\377')", "watch $(printf 'a\\377')", "follow $(printf 'a\\377') --out /tmp",
        "tag r $(printf 'a\\377')", "plan --parameters 1000 --rule $(printf 'a\\377')"}) {
    const Answer answer = Ballastctl(words);
    EXPECT_EQ(answer.code, 1) << words;
    EXPECT_THAT(answer.text, AllOf(HasSubstr(" is 'a\\xff', which is not valid UTF-8"), Not(HasSubstr("libprotobuf"))))
        << words;
  }
}

TEST_F(BallastctlTest, TheHttpPortIsToldFromAPortWhereNobodyListens) {
  const Answer answer = Ballastctl("--timeout 1 status --server " + daemon_.ops_address());
  EXPECT_EQ(answer.code, 69);
  EXPECT_THAT(answer.text, HasSubstr("what listens there is no gRPC port; a daemon's HTTP port, by default 9464"));
}

TEST_F(BallastctlTest, RunsListsEachRun) {
  EXPECT_THAT(Ballastctl("runs").text, HasSubstr("no runs"));
  Train();
  const Answer answer = Ballastctl("runs");
  EXPECT_EQ(answer.code, 0);
  EXPECT_THAT(answer.text, AllOf(HasSubstr("least-squares  training     3"), HasSubstr("B/param")));
}

TEST_F(BallastctlTest, ARunThatItsTrainerHasLeftIsFinished) {
  Train();
  client_.reset();
  EXPECT_SOON(Ballastctl("runs").text, HasSubstr("least-squares  finished "));
  EXPECT_THAT(Ballastctl("run least-squares").text, ContainsRegex("least-squares, finished .* ago"));
}

TEST_F(BallastctlTest, RunShowsProgressMemoryLayersAndRanks) {
  Train();
  const Answer answer = Ballastctl("run least-squares");
  EXPECT_EQ(answer.code, 0);
  EXPECT_THAT(answer.text, AllOf(HasSubstr("3 closed: 3 applied, 0 skipped, 0 partial, 0 aborted"),
                                 HasSubstr("12,416 parameters"), HasSubstr("momentum"), HasSubstr("GRADIENT NORM"),
                                 HasSubstr("device         cpu"), HasSubstr("connected")));
}

TEST_F(BallastctlTest, RunNamesTheRankThatAStepAwaits) {
  Train();
  ASSERT_TRUE(client_->BeginStep({}).ok());
  EXPECT_SOON(Ballastctl("run least-squares").text,
              ContainsRegex("step 4 awaits +rank 0, which (has sent nothing|lacks 2 of 2 tensors).*, for "));
}

TEST_F(BallastctlTest, HistoryIsCsvWithARowAStep) {
  Train();
  const Answer answer = Ballastctl("history least-squares --after 1");
  EXPECT_EQ(answer.code, 0) << answer.text;
  const std::vector<std::string> lines = absl::StrSplit(answer.text, '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), 3u) << answer.text;
  EXPECT_THAT(lines[0], StartsWith("step,outcome,reason,closed_at_s,loss,"));
  EXPECT_THAT(lines[1], StartsWith("2,applied,,"));
  EXPECT_THAT(lines[2], StartsWith("3,applied,,"));
  const auto columns = [](const std::string& line) { return std::count(line.begin(), line.end(), ','); };
  EXPECT_EQ(columns(lines[1]), columns(lines[0]));
  EXPECT_THAT(Ballastctl("history least-squares --json").text, HasSubstr("\"update_seconds\": "));
  EXPECT_EQ(Ballastctl("history least-squares --after x").code, 64);
}

TEST_F(BallastctlTest, WatchShowsEachStepAndEnds) {
  Train();
  const Answer answer = Ballastctl("watch least-squares --steps 3");
  EXPECT_EQ(answer.code, 0) << answer.text;
  EXPECT_THAT(answer.text,
              MatchesRegex(" +STEP +OUTCOME +LOSS.*\n +1 +applied .*\n +2 +applied .*\n +3 +applied .*\n"));
  EXPECT_EQ(Ballastctl("watch least-squares --interval 0").code, 64);
}

TEST_F(BallastctlTest, WatchAsJsonHasAStepALine) {
  Train();
  const Answer answer = Ballastctl("watch least-squares --steps 3 --json");
  EXPECT_EQ(answer.code, 0);
  const std::vector<std::string> lines = absl::StrSplit(answer.text, '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), 3u) << answer.text;
  for (size_t i = 0; i < lines.size(); ++i) {
    EXPECT_THAT(lines[i], AllOf(StartsWith(absl::StrCat("{\"step\":\"", i + 1, "\"")), EndsWith("}")));
  }
}

TEST_F(BallastctlTest, WatchSaysThatTheRunWasDeleted) {
  Train();
  ASSERT_TRUE(client_->DeleteRun("least-squares", true).ok());
  const Answer answer = Ballastctl("watch least-squares");
  EXPECT_EQ(answer.code, 1);
  EXPECT_THAT(answer.text, HasSubstr("'least-squares'"));
}

TEST_F(BallastctlTest, ExplainTellsWhereAStepsTimeWent) {
  Train();
  const Answer answer = Ballastctl("explain least-squares 2");
  EXPECT_EQ(answer.code, 0) << answer.text;
  EXPECT_THAT(
      answer.text,
      AllOf(
          HasSubstr("step 2 was applied"),
          ContainsRegex(
              "it closed .* after the step before it, .* times the median of the last 3 steps; the longest of these: "),
          HasSubstr("updates"), HasSubstr("nothing was found")));
  EXPECT_THAT(Ballastctl("explain least-squares 1").text, Not(HasSubstr("median")));
  const Answer unknown = Ballastctl("explain least-squares 99");
  EXPECT_EQ(unknown.code, 1);
  EXPECT_THAT(unknown.text, HasSubstr("step 99 is not among those remembered: 1 to 3"));
  EXPECT_EQ(Ballastctl("explain least-squares two").code, 64);
}

TEST_F(BallastctlTest, AnUnknownRunIsRefusedByName) {
  const Answer answer = Ballastctl("run nowhere");
  EXPECT_EQ(answer.code, 1);
  EXPECT_THAT(answer.text, HasSubstr("nowhere"));
}

TEST_F(BallastctlTest, PlanSaysWhatIsReservedAndWhetherItFits) {
  const Answer fits = Ballastctl("plan --parameters 1e6 --tensors 10 --dtype fp32");
  EXPECT_EQ(fits.code, 0) << fits.text;
  EXPECT_THAT(fits.text, AllOf(HasSubstr("1,000,000 parameters in 10 tensors of fp32"), HasSubstr("4,000,000"),
                               HasSubstr("fits: "), HasSubstr("would be on cpu")));
  const Answer too_large = Ballastctl("plan --parameters 8e9");
  EXPECT_EQ(too_large.code, 1);
  EXPECT_THAT(too_large.text, HasSubstr("does not fit: "));
  EXPECT_EQ(Ballastctl("plan --parameters 1e6 --state nothing").code, 1);
  EXPECT_THAT(Ballastctl("plan --parameters 1e6 --ranks 65").text, HasSubstr("ranks is 65"));
  EXPECT_THAT(Ballastctl("plan --parameters 1e6 --ranks 99999999999").text, HasSubstr("--ranks is 99999999999"));
}

// All gradients are kept: 2 bytes a parameter as one rank sends them in bf16, 4 as a sum; beside each rank's window.
TEST_F(BallastctlTest, PlanCountsTheGradientsOfAStagedRun) {
  const auto gradients = [this](const std::string& flags) {
    const Answer answer = Ballastctl("plan --parameters 1e8 --tensors 50 --json " + flags);
    const std::string key = "\"gradients\": \"";
    const size_t at = answer.text.find(key);
    EXPECT_NE(at, std::string::npos) << answer.text;
    return at == std::string::npos ? uint64_t{0} : std::stoull(answer.text.substr(at + key.size()));
  };
  const uint64_t release = gradients(""), one = gradients("--commit staged");
  const uint64_t two = gradients("--commit staged --ranks 2"), micros = gradients("--accumulation 4");
  EXPECT_LT(release, uint64_t{200'000'000});
  EXPECT_GE(one, uint64_t{200'000'000});
  EXPECT_GE(two, uint64_t{400'000'000});
  EXPECT_EQ(micros, gradients("--accumulation 4 --commit staged"));
  const Answer wrong = Ballastctl("plan --parameters 1e6 --commit atomic");
  EXPECT_EQ(wrong.code, 64);
  EXPECT_THAT(wrong.text, HasSubstr("--commit is 'atomic'; wanted release or staged"));
}

TEST_F(BallastctlTest, DeleteWantsForceWhileATrainerIsAttached) {
  Train();
  EXPECT_EQ(Ballastctl("delete least-squares").code, 1);
  const Answer answer = Ballastctl("delete least-squares --force");
  EXPECT_EQ(answer.code, 0);
  EXPECT_THAT(answer.text, HasSubstr("deleted run 'least-squares', freed "));
}

TEST_F(BallastctlTest, RewindListsAndTakesARunBack) {
  client_ = Client::Connect({.server = daemon_.address()}).value();
  v1::RunSpec spec = LeastSquares::Spec();
  spec.mutable_rewind()->set_snapshots(2);
  spec.mutable_rewind()->set_every(1);
  ASSERT_TRUE(client_->CreateRun(spec).ok());
  EXPECT_THAT(Ballastctl("rewind least-squares").text, HasSubstr("is at step 0; it can be rewound to no step yet"));
  ASSERT_TRUE(client_->Attach({.run_id = "least-squares"}).ok());
  ASSERT_TRUE(problem_.UploadAndBind(*client_).ok());
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(problem_.Step(*client_).ok());
  EXPECT_THAT(Ballastctl("rewind least-squares").text, HasSubstr("is at step 4; it can be rewound to step 3, 4\n"));
  EXPECT_THAT(Ballastctl("run least-squares").text, HasSubstr("3, 4; rewound 0 times"));
  const Answer refused = Ballastctl("rewind least-squares --to 1");
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(refused.text, HasSubstr("kept are those of steps 3, 4"));
  EXPECT_EQ(Ballastctl("rewind least-squares --to 1 --back 2").code, 64);
  EXPECT_EQ(Ballastctl("rewind least-squares --back some").code, 64);
  const Answer answer = Ballastctl("rewind least-squares --back 1");
  EXPECT_EQ(answer.code, 0);
  EXPECT_EQ(answer.text, "run 'least-squares' is back at step 3, generation 2; its trainers go on with step 4\n");
  EXPECT_THAT(Ballastctl("run least-squares").text, HasSubstr("3 now; of all made, those since undone too: 4 applied"));
  EXPECT_EQ(RewoundTo(problem_.Step(*client_).status()), 3u);
}

TEST_F(BallastctlTest, ADaemonWithoutStorageWritesAndRestoresNothing) {
  Train();
  for (const char* words :
       {"checkpoint least-squares", "checkpoints least-squares", "restore least-squares --step 3"}) {
    const Answer answer = Ballastctl(words);
    EXPECT_EQ(answer.code, 1) << words;
    EXPECT_THAT(answer.text, HasSubstr("no storage")) << words;
  }
  EXPECT_TRUE(problem_.Step(*client_).ok());
}

TEST_F(BallastctlTest, PlanCountsSnapshots) {
  const Answer answer = Ballastctl("plan --parameters 1e6 --snapshots 2");
  EXPECT_EQ(answer.code, 0) << answer.text;
  EXPECT_THAT(answer.text, HasSubstr("snapshots, in host memory"));
  EXPECT_EQ(Ballastctl("plan --parameters 1e6 --snapshots some").code, 64);
}

TEST_F(BallastctlTest, PlanCountsTheFormatsThatReadersFollowIn) {
  const auto following = [this](const std::string& flags) {
    const Answer answer = Ballastctl("plan --parameters 1e8 --tensors 50 --json --readers 1 " + flags);
    const std::string key = "\"following\": \"";
    const size_t at = answer.text.find(key);
    EXPECT_NE(at, std::string::npos) << answer.text;
    return at == std::string::npos ? uint64_t{0} : std::stoull(answer.text.substr(at + key.size()));
  };
  const uint64_t alone = following(""), eight = following("--reader-formats fp8-e4m3");
  EXPECT_EQ(following("--reader-formats bf16"), alone) << "it is served in it";
  EXPECT_GT(eight, alone + 350'000'000u);
  EXPECT_LT(eight, alone + 380'000'000u) << "and what its chunks take beside";
  EXPECT_GT(following("--reader-formats fp8-e4m3,fp32"), eight + 1'400'000'000u);
  EXPECT_EQ(Ballastctl("plan --parameters 1e6 --reader-formats bf17").code, 1);
}

TEST_F(BallastctlTest, HealthIsServing) {
  const Answer answer = Ballastctl("health");
  EXPECT_EQ(answer.code, 0) << answer.text;
  EXPECT_EQ(answer.text, "SERVING\n");
}

TEST_F(BallastctlTest, DoctorFindsNothingToFail) {
  const Answer answer = Ballastctl("doctor");
  EXPECT_EQ(answer.code, 0) << answer.text;
  EXPECT_THAT(answer.text,
              AllOf(HasSubstr("OK    reachable"), HasSubstr("OK    protocol"), HasSubstr("/readyz is ready"),
                    HasSubstr("OK    files"), HasSubstr("WARN  processors"), HasSubstr("fix: ")));
  EXPECT_THAT(Ballastctl("doctor --json").text, HasSubstr("\"level\": \"OK\""));
}

TEST_F(BallastctlTest, OfSeveralDaemonsEachIsExamined) {
  auto other = std::make_unique<RealDaemon>();
  const std::string second = other->address(), both = daemon_.address() + "," + second;
  EXPECT_EQ(Ballastctl("health --server " + both).text, "SERVING\n");
  const Answer found = Ballastctl("doctor --server " + both);
  EXPECT_EQ(found.code, 0) << found.text;
  EXPECT_THAT(found.text, AllOf(HasSubstr("daemon " + daemon_.address()), HasSubstr("daemon " + second)));
  EXPECT_THAT(Ballastctl("doctor --json --server " + both).text, HasSubstr("\"server\": \"" + second + "\""));

  other.reset();
  const Answer away = Ballastctl("doctor --timeout 1 --server " + both);
  EXPECT_EQ(away.code, 69) << away.text;
  EXPECT_THAT(away.text, AllOf(HasSubstr("OK    reachable"), HasSubstr("FAIL  reachable"), HasSubstr(second)));
  EXPECT_EQ(Ballastctl("health --timeout 1 --server " + both).code, 69);
}

TEST_F(BallastctlTest, DoctorNamesAnOpsPortThatDoesNotAnswer) {
  Config config = RealDaemon::Small();
  Metrics metrics{BuildInfo{}};
  const auto server = Server::Start(config, &metrics, "127.0.0.1:1").value();
  const Answer answer = Ballastctl("doctor --server " + server->address());
  EXPECT_EQ(answer.code, 1);
  EXPECT_THAT(answer.text, HasSubstr("FAIL  metrics"));
}

TEST_F(BallastctlTest, DoctorTellsHowToAllowAName) {
  Config config = RealDaemon::Small();
  Metrics metrics{BuildInfo{}};
  // The ops port by a name of it that is no IP address as RFC 3986 has them, and that needs no server of names.
  const std::string ops = daemon_.ops_address();
  const auto server = Server::Start(config, &metrics, "127.1" + ops.substr(ops.rfind(':'))).value();
  const Answer answer = Ballastctl("doctor --server " + server->address());
  EXPECT_EQ(answer.code, 1);
  EXPECT_THAT(answer.text, AllOf(HasSubstr("FAIL  metrics"), HasSubstr("says 403: The name '127.1' is not served"),
                                 HasSubstr("set ops_http.hosts: [127.1]")));
}

}  // namespace
}  // namespace ballast
