// What comes before and beside the steps: a lost connection at every moment of it, and a daemon that is busy. The steps
// themselves are resume_test's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

#include "tests/client/fake_daemon.h"
#include "tests/client/trainer.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Pulled = std::map<uint32_t, std::string>;

absl::Status PullInto(Client& client, absl::Span<const uint32_t> tensors, Pulled* pulled,
                      absl::Span<const uint64_t> digests = {}) {
  const auto sink = [&](uint32_t tensor, uint64_t offset, absl::Span<const std::byte> piece, uint64_t) {
    (*pulled)[tensor].resize(offset);  // it may begin again
    (*pulled)[tensor].append(reinterpret_cast<const char*>(piece.data()), piece.size());
    return absl::OkStatus();
  };
  return client.Pull("r", tensors, sink, /*snapshot=*/0, digests);
}

// Creates, attaches, loads, makes a step and pulls, all of it right.
void TrainAndPull(FakeDaemon& daemon, std::vector<uint32_t> wanted) {
  Trainer trainer(daemon.address());
  const auto created = trainer.client->CreateRun(FakeSpec());
  ASSERT_TRUE(created.ok()) << created.status();
  ASSERT_TRUE(trainer.Attach().ok()) << trainer.attachment.status();
  ASSERT_NO_FATAL_FAILURE(Upload(trainer, daemon));
  const auto result = trainer.Step();
  ASSERT_TRUE(result.ok()) << result.status();
  Pulled pulled;
  const absl::Status status = PullInto(*trainer.client, wanted, &pulled);
  ASSERT_TRUE(status.ok()) << status;
  for (const auto& [tensor, bytes] : pulled) EXPECT_EQ(bytes, Updated(trainer.Gradient(tensor, 1), 1)) << tensor;
  EXPECT_EQ(pulled.size(), wanted.empty() ? 4u : wanted.size());
}

void CutAtEveryMoment(const std::vector<uint32_t>& wanted) {
  FakeDaemon uncut;
  ASSERT_NO_FATAL_FAILURE(TrainAndPull(uncut, wanted));
  const int moments = uncut.seen().moments;
  ASSERT_GT(moments, 20);
  for (int i = 0; i < moments; ++i) {
    SCOPED_TRACE(absl::StrCat("cut at moment ", i));
    FakeDaemon daemon({.cut_at_moment = i});
    ASSERT_NO_FATAL_FAILURE(TrainAndPull(daemon, wanted));
  }
}

TEST(RecoveryTest, ACutAtAnyMomentBesideTheStepsIsInvisible) { CutAtEveryMoment({0, 1, 3}); }
TEST(RecoveryTest, ACutWhileAllTensorsArePulledIsInvisible) { CutAtEveryMoment({}); }

TEST(RecoveryTest, APullGoesOnWithTheTensorThatItWasAt) {
  FakeDaemon uncut;
  Trainer first(uncut.address());
  ASSERT_TRUE(first.Attach().ok());
  ASSERT_TRUE(first.Step().ok());
  const int before = uncut.seen().moments;
  FakeDaemon daemon({.cut_at_moment = before + 1 + 4});  // tensor 0 is three messages, tensor 1 one
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step().ok());
  Pulled pulled;
  ASSERT_TRUE(PullInto(*trainer.client, {}, &pulled).ok());
  EXPECT_EQ(pulled.size(), 4u);
  EXPECT_EQ(daemon.seen().pulled, 3 + 1 + 1 + 2);
}

// After progress, each loss counts as a new one: it is logged, and reconnect_timeout begins anew.
TEST(RecoveryTest, APieceOfATensorFurtherThanAnyBeforeIsProgressOfAPull) {
  FakeDaemon uncut;
  Trainer first(uncut.address());
  ASSERT_TRUE(first.Attach().ok());
  ASSERT_TRUE(first.Step().ok());
  const int began = uncut.seen().moments;
  // After one piece of tensor 0, after two, and after one.
  FakeDaemon daemon({.also_cut_at_moments = {began + 2, began + 6, began + 9}});
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step().ok());
  Pulled pulled;
  ASSERT_TRUE(PullInto(*trainer.client, {0}, &pulled).ok());
  EXPECT_EQ(daemon.seen().pulled, 1 + 2 + 1 + 3);
  EXPECT_THAT(trainer.Lines(), ElementsAre(HasSubstr("pulling weights"), HasSubstr("pulling weights")));
}

// Meanwhile a rewind took the weights back to what the reader had before a part of newer ones was written over them.
TEST(RecoveryTest, ATensorThatCameInPartIsSentWholeThoughItIsAgainWhatTheReaderHad) {
  FakeDaemon uncut;
  Trainer first(uncut.address());
  ASSERT_TRUE(first.Attach().ok());
  ASSERT_TRUE(first.Step().ok());
  const uint64_t digests[] = {7, 8};
  FakeDaemon daemon({.cut_at_moment = uncut.seen().moments + 1 + 1, .back_at = {{0, 7}, {1, 8}}});
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step().ok());
  Pulled pulled;
  const absl::Status status = PullInto(*trainer.client, {0, 1}, &pulled, digests);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(pulled, (Pulled{{0, Updated(trainer.Gradient(0, 1), 1)}})) << "nothing came of tensor 1, which is the same";
}

TEST(RecoveryTest, ADaemonThatStaysAwayIsNamedWithWhatWasTried) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address(), /*reconnect_timeout_s=*/0.2);
  daemon.Shutdown();
  const absl::Time began = absl::Now();
  const absl::Status created = trainer.client->CreateRun(FakeSpec()).status();
  EXPECT_GE(absl::Now() - began, absl::Milliseconds(150));
  EXPECT_EQ(created.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(created.message()), HasSubstr("creating run 'r': the daemon at " + daemon.address()));
  EXPECT_THAT(std::string(created.message()), HasSubstr("within 0.2 s"));
  EXPECT_EQ(trainer.Attach().code(), absl::StatusCode::kUnavailable);
  Pulled pulled;
  EXPECT_EQ(PullInto(*trainer.client, {}, &pulled).code(), absl::StatusCode::kUnavailable);
}

TEST(RecoveryTest, AnUploadToADaemonThatStaysAwayEnds) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address(), /*reconnect_timeout_s=*/0.2);
  ASSERT_TRUE(trainer.Attach().ok());
  daemon.Shutdown();
  const std::string a(40, 'a');
  const TensorView view{.tensor = 0, .format = "fp32", .bytes = BytesOf(a)};
  const absl::Status loaded = trainer.client->LoadWeights({&view, 1}).status();
  EXPECT_EQ(loaded.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(loaded.message()), HasSubstr("lost the daemon at " + daemon.address()));
}

TEST(RecoveryTest, AnInterruptEndsTheWaitForADaemonThatIsAway) {
  FakeDaemon daemon;
  std::atomic<bool> interrupted = false;
  const auto client = Client::Connect({.server = daemon.address(),
                                       .reconnect_timeout_s = 600,
                                       .log = [&](const std::string&) { interrupted = true; },
                                       .interrupted = [&] { return interrupted.load(); }})
                          .value();
  ASSERT_TRUE(client->Attach({.run_id = "r"}).ok());
  daemon.Shutdown();
  const std::string a(40, 'a');
  const TensorView view{.tensor = 0, .format = "fp32", .bytes = BytesOf(a)};
  EXPECT_EQ(client->LoadWeights({&view, 1}).status().code(), absl::StatusCode::kCancelled);
  interrupted = false;
  Pulled pulled;
  EXPECT_EQ(PullInto(*client, {}, &pulled).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(interrupted);
}

TEST(RecoveryTest, AnUploadThatNeverComesFurtherEnds) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address(), /*reconnect_timeout_s=*/0.2);
  ASSERT_TRUE(trainer.Attach().ok());
  daemon.CutLoads();
  const std::string a(40, 'a');
  const TensorView view{.tensor = 0, .format = "fp32", .bytes = BytesOf(a)};
  EXPECT_EQ(trainer.client->LoadWeights({&view, 1}).status().code(), absl::StatusCode::kUnavailable);
}

// The daemon is finishing the step of the rank's last process, or serves too many requests at a time.
TEST(RecoveryTest, ABusyDaemonIsAskedAgainWhenItSays) {
  using grpc::StatusCode;
  FakeDaemon daemon;
  daemon.RefuseAttach({{StatusCode::UNAVAILABLE, "step 1 is being finished; attach again"}, 30});
  daemon.RefuseAttach({{StatusCode::RESOURCE_EXHAUSTED, "too many attach at a time"}, 5});
  daemon.RefuseAttach({{StatusCode::ALREADY_EXISTS, "held for another 5 ms"}, 5});
  Trainer trainer(daemon.address(), /*reconnect_timeout_s=*/0);
  const absl::Time began = absl::Now();
  ASSERT_TRUE(trainer.Attach().ok()) << trainer.attachment.status();
  EXPECT_GE(absl::Now() - began, absl::Milliseconds(40));
  EXPECT_EQ(daemon.seen().attaches.size(), 4u);
  EXPECT_THAT(trainer.Lines(), ElementsAre(HasSubstr("waiting 0.03 s (step 1 is being finished; attach again)")));
  ASSERT_TRUE(trainer.Step().ok());

  for (int i = 0; i < 3; ++i) daemon.RefusePull({{StatusCode::RESOURCE_EXHAUSTED, "4 Pulls are under way"}, 5});
  Pulled pulled;
  ASSERT_TRUE(PullInto(*trainer.client, {1}, &pulled).ok());
  EXPECT_EQ(pulled.size(), 1u);
}

// An interrupt ends what would take minutes.
std::vector<std::string> LinesOfAttach(const FakeDaemon& daemon, AttachOptions options) {
  std::vector<std::string> lines;
  std::atomic<bool> interrupted = false;
  const auto client = Client::Connect({.server = daemon.address(),
                                       .reconnect_timeout_s = 0,
                                       .log =
                                           [&](const std::string& line) {
                                             lines.push_back(line);
                                             interrupted = true;
                                           },
                                       .interrupted = [&] { return interrupted.load(); }})
                          .value();
  options.run_id = "r";
  EXPECT_EQ(client->Attach(options).status().code(), absl::StatusCode::kUnavailable);
  return lines;
}

TEST(RecoveryTest, AStepThatIsOpenForLongIsWaitedForAsLongAsTheOptionSays) {
  const FakeDaemon::Refusal open{{grpc::StatusCode::UNAVAILABLE, "step 7 is being made without rank 0"}, 1'000'000};
  FakeDaemon daemon;
  daemon.RefuseAttach(open);
  EXPECT_THAT(LinesOfAttach(daemon, {}), ElementsAre(HasSubstr("waiting 1e+03 s (step 7 is being made without rank")));
  daemon.RefuseAttach(open);
  EXPECT_THAT(LinesOfAttach(daemon, {.join_timeout_s = 999}), IsEmpty());
}

TEST(RecoveryTest, AWaitForAStepThatEndsNamesItsOption) {
  FakeDaemon daemon;
  daemon.RefuseAttach({{grpc::StatusCode::UNAVAILABLE, "step 7 is being made without rank 0; attach again"}, 5});
  Trainer trainer(daemon.address());
  const absl::Status late = trainer.client->Attach({.run_id = "r", .join_timeout_s = 0}).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(late.message()), AllOf(HasSubstr("attaching as rank 0 of run 'r': step 7 is being made"),
                                                 HasSubstr("not over within 0 s"), HasSubstr("raise join_timeout_s")));
}

TEST(RecoveryTest, ADaemonThatIsBusyIsAskedAgainButNotForEver) {
  using grpc::StatusCode;
  FakeDaemon daemon;
  for (int i = 0; i < 3; ++i) daemon.RefuseCreateRun({{StatusCode::RESOURCE_EXHAUSTED, "busy with 256 requests"}, 5});
  Trainer trainer(daemon.address(), /*reconnect_timeout_s=*/0);
  const auto created = trainer.client->CreateRun(FakeSpec());
  EXPECT_TRUE(created.ok()) << created.status();
  EXPECT_EQ(daemon.seen().creations, 4);
  daemon.RefuseCreateRun({{StatusCode::RESOURCE_EXHAUSTED, "busy with 256 requests"}, 1'000'000});
  EXPECT_EQ(trainer.client->CreateRun(FakeSpec()).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(daemon.seen().creations, 5);
  daemon.RefusePull({{StatusCode::RESOURCE_EXHAUSTED, "4 Pulls are under way"}, 1'000'000});
  Pulled pulled;
  EXPECT_EQ(PullInto(*trainer.client, {1}, &pulled).code(), absl::StatusCode::kResourceExhausted);
}

TEST(RecoveryTest, ARunThatDoesNotFitIsRefusedAtOnce) {
  FakeDaemon daemon;
  daemon.RefuseAttach({{grpc::StatusCode::RESOURCE_EXHAUSTED, "does not fit"}, 0});
  Trainer trainer(daemon.address());
  EXPECT_EQ(trainer.Attach(), absl::ResourceExhaustedError("does not fit"));
  EXPECT_EQ(daemon.seen().attaches.size(), 1u);
  EXPECT_THAT(trainer.Lines(), IsEmpty());
}

TEST(RecoveryTest, AResumingClientAsksABusyDaemonAgain) {
  FakeDaemon daemon({.cut_at_received = 6});
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  daemon.RefuseAttach({{grpc::StatusCode::RESOURCE_EXHAUSTED, "too many attach at a time"}, 5});
  ASSERT_TRUE(trainer.Step().ok());
  EXPECT_EQ(daemon.seen().attaches.size(), 3u);
}

TEST(RecoveryTest, ADaemonThatPutsTheAttachOffIsNotLost) {
  FakeDaemon daemon({.cut_at_received = 6});
  Trainer trainer(daemon.address(), /*reconnect_timeout_s=*/0.2);
  ASSERT_TRUE(trainer.Attach().ok());
  for (int i = 0; i < 4; ++i) daemon.RefuseAttach({{grpc::StatusCode::RESOURCE_EXHAUSTED, "too many calls"}, 100});
  const auto result = trainer.Step();
  ASSERT_TRUE(result.ok()) << result.status();
}

// Who reads "the run is gone" begins it anew, and loses it.
TEST(RecoveryTest, AQuestionThatIsRefusedIsNotReadAsARunThatIsGone) {
  for (const auto refuse : {&FakeDaemon::RefuseGetServer, &FakeDaemon::RefuseListRuns}) {
    FakeDaemon daemon;
    Trainer trainer(daemon.address(), /*reconnect_timeout_s=*/0.2);
    ASSERT_TRUE(trainer.Attach().ok());
    ASSERT_TRUE(trainer.Step().ok());
    daemon.ReadRunBack(1);
    for (int i = 0; i < 3; ++i) (daemon.*refuse)({{grpc::StatusCode::PERMISSION_DENIED, "not yours"}});
    const absl::Status status = trainer.Step().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("not yours"));
  }
}

TEST(RecoveryTest, AQuestionIsAskedAgainAndADaemonThatEndsItIsNamed) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address(), /*reconnect_timeout_s=*/0.2);
  const FakeDaemon::Refusal ended{{grpc::StatusCode::CANCELLED, "CANCELLED"}};  // as gRPC says when it shuts down
  daemon.RefuseGetServer(ended);
  EXPECT_TRUE(trainer.client->GetServer().ok());
  for (int i = 0; i < 100; ++i) daemon.RefuseGetServer(ended);
  const absl::Status lost = trainer.client->GetServer().status();
  EXPECT_EQ(lost.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(lost.message()),
              AllOf(HasSubstr(daemon.address()), HasSubstr("it ended the call"), HasSubstr("reconnect_timeout_s")));
}

}  // namespace
}  // namespace ballast
