#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/time/clock.h"

#include "tests/client/fake_daemon.h"
#include "tests/client/trainer.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const grpc::Status kTaken(grpc::StatusCode::ALREADY_EXISTS, "a live session holds the rank");
const grpc::Status kTooMany(grpc::StatusCode::RESOURCE_EXHAUSTED, "more than the 2 calls a second that it may");

TEST(AttachTest, AnAbsentDaemonIsNamedWithServerTimeAndFix) {
  std::string address;
  {
    FakeDaemon daemon;
    address = daemon.address();
  }
  const auto client = Client::Connect({.server = address, .connect_timeout_s = 0.2});
  EXPECT_EQ(client.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(client.status().message(), "no ballastd answers at " + address +
                                           " within 0.2 s (connection refused): start one with `ballastd`, or give "
                                           "server=\"host:port\"");
}

TEST(AttachTest, AsksForDigestsAndSpeaksProtocolOne) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  EXPECT_EQ(trainer.attachment->resume_step, 1u);
  const auto attach = daemon.seen().attaches.at(0);
  EXPECT_TRUE(attach.want_digests());
  EXPECT_FALSE(attach.takeover());
  EXPECT_EQ(attach.protocol_max(), 1u);
}

// The daemon could not read it, nor say so.
TEST(AttachTest, ANameThatIsNoTextIsRefusedAtOnce) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  const auto sink = [](const ServedPiece&) { return absl::OkStatus(); };
  const TensorView view{.tensor = 0, .slot = "\xff"};
  const std::string slots[] = {"\xff"};
  const auto other = Client::Connect({.server = daemon.address()}).value();
  for (const absl::Status& refused :
       {other->Attach({.run_id = "\xff"}).status(), other->PullServed("\xff", {}, sink),
        other->PullState("r", {}, slots, sink), trainer.client->LoadWeights({&view, 1}).status()}) {
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("is '\\xff', which is not valid UTF-8"));
  }
  EXPECT_TRUE(trainer.Step().ok());
}

TEST(AttachTest, WaitsForTheLeaseOfALostPredecessor) {
  FakeDaemon daemon;
  daemon.RefuseAttach({kTaken, 30});
  daemon.RefuseAttach({kTaken, 5});
  Trainer trainer(daemon.address());
  const absl::Time began = absl::Now();
  ASSERT_TRUE(trainer.Attach().ok());
  EXPECT_GE(absl::Now() - began, absl::Milliseconds(35));
  EXPECT_EQ(daemon.seen().attaches.size(), 3u);
  EXPECT_THAT(trainer.Lines(), ElementsAre(HasSubstr("waiting")));
}

TEST(AttachTest, ADaemonThatIsBusyIsAskedAgainWhenItSays) {
  FakeDaemon daemon;
  const grpc::Status busy(grpc::StatusCode::RESOURCE_EXHAUSTED, "busy with 256 requests");
  daemon.RefuseCreateRun({busy, 1});
  daemon.RefuseCreateRun({busy, 1});
  const auto client = Client::Connect({.server = daemon.address()}).value();
  const auto created = client->CreateRun(FakeSpec());
  EXPECT_TRUE(created.ok()) << created.status();
  daemon.RefuseCreateRun({{grpc::StatusCode::RESOURCE_EXHAUSTED, "it does not fit"}});
  EXPECT_EQ(client->CreateRun(FakeSpec()).status().code(), absl::StatusCode::kResourceExhausted) << "asked once";
}

TEST(AttachTest, WhoIsInterruptedWaitsForNoBusyDaemon) {
  FakeDaemon daemon;
  daemon.RefuseCreateRun({{grpc::StatusCode::RESOURCE_EXHAUSTED, "busy with 256 requests"}, 60'000});
  const auto client = Client::Connect({.server = daemon.address(), .interrupted = [] { return true; }}).value();
  EXPECT_EQ(client->CreateRun(FakeSpec()).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(AttachTest, AStreamThatIsPutOffIsOpenedWhenTheDaemonSaysAndAttachIsNotCalledAgain) {
  FakeDaemon daemon;
  for (int i = 0; i < 3; ++i) daemon.RefuseTrain({kTooMany, 5});
  Trainer trainer(daemon.address());
  const absl::Time began = absl::Now();
  ASSERT_TRUE(trainer.Attach().ok());
  EXPECT_GE(absl::Now() - began, absl::Milliseconds(15));
  EXPECT_EQ(daemon.seen().attaches.size(), 1u);
  EXPECT_THAT(trainer.Lines(),
              ElementsAre(AllOf(HasSubstr("puts its stream off"), HasSubstr("more than the 2 calls"))));
  EXPECT_TRUE(trainer.Step().ok());
}

TEST(AttachTest, WhileItsStreamIsPutOffTheLeaseIsRenewed) {
  FakeDaemon daemon({.lease_s = 0.03});
  for (int i = 0; i < 5; ++i) daemon.RefuseTrain({kTooMany, 1000});
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  const auto attaches = daemon.seen().attaches;
  EXPECT_EQ(attaches.size(), 6u);
  EXPECT_EQ(attaches.back().session_token(), "token");
  EXPECT_TRUE(trainer.Step().ok());
}

TEST(AttachTest, AStreamThatIsRefusedForGoodFailsTheAttach) {
  FakeDaemon daemon;
  daemon.RefuseTrain({kTooMany});
  Trainer trainer(daemon.address());
  EXPECT_EQ(trainer.Attach().code(), absl::StatusCode::kResourceExhausted);
}

TEST(AttachTest, WhoIsInterruptedWaitsForNoStream) {
  FakeDaemon daemon;
  daemon.RefuseTrain({kTooMany, 100'000});
  const auto client =
      Client::Connect(
          {.server = daemon.address(), .log = [](const std::string&) {}, .interrupted = [] { return true; }})
          .value();
  EXPECT_EQ(client->Attach({.run_id = "r"}).status().code(), absl::StatusCode::kCancelled);
}

TEST(AttachTest, AnUploadThatIsPutOffBeginsWhenTheDaemonSays) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  for (int i = 0; i < 2; ++i) daemon.RefuseLoad({kTooMany, 5});
  Upload(trainer, daemon);
  EXPECT_THAT(trainer.Lines(), ElementsAre(AllOf(HasSubstr("uploading weights"), HasSubstr("more than the 2 calls"))));
  EXPECT_EQ(daemon.seen().attaches.size(), 1u);
}

TEST(AttachTest, DoesNotWaitLongerThanAllowed) {
  FakeDaemon daemon;
  daemon.RefuseAttach({kTaken, 60000});
  Trainer trainer(daemon.address());
  const auto attached = trainer.client->Attach({.run_id = "r", .wait_s = 0.5});
  EXPECT_EQ(attached.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(daemon.seen().attaches.size(), 1u);
}

TEST(AttachTest, AnInterruptedWaitIsNotSaidToHaveTakenTooLong) {
  FakeDaemon daemon;
  daemon.RefuseAttach({{grpc::StatusCode::UNAVAILABLE, "step 7 is being made without rank 0"}, 1000});
  const auto client =
      Client::Connect(
          {.server = daemon.address(), .log = [](const std::string&) {}, .interrupted = [] { return true; }})
          .value();
  const absl::Status status = client->Attach({.run_id = "r"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(std::string(status.message()), "step 7 is being made without rank 0");
}

TEST(AttachTest, ADetachedClientMayAttachAgain) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  trainer.client->Detach();
  ASSERT_TRUE(trainer.Attach().ok());
  trainer.client->Detach();
  EXPECT_TRUE(trainer.Attach().ok());
}

// The daemon has not heard of its end yet; then the lease begins.
TEST(AttachTest, APredecessorThatSeemsAliveIsWaitedForAndThenItsWholeLease) {
  FakeDaemon daemon;
  for (int i = 0; i < 8; ++i) daemon.RefuseAttach({kTaken, 0});
  daemon.RefuseAttach({kTaken, 2500});
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.client->Attach({.run_id = "r", .wait_s = 4}).ok());
  EXPECT_EQ(daemon.seen().attaches.size(), 10u);
  EXPECT_THAT(trainer.Lines(), ElementsAre(HasSubstr("in case its process has ended"), HasSubstr("waiting 2.5 s")));
}

TEST(AttachTest, APredecessorThatGoesOnIsWaitedForNoLongerThanAllowed) {
  FakeDaemon daemon;
  for (int i = 0; i < 100; ++i) daemon.RefuseAttach({kTaken, 0});
  Trainer trainer(daemon.address());
  const absl::Time began = absl::Now();
  const auto attached = trainer.client->Attach({.run_id = "r", .wait_s = 0.5});
  EXPECT_EQ(attached.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_GE(absl::Now() - began, absl::Milliseconds(400));
  EXPECT_LE(daemon.seen().attaches.size(), 10u) << "it is not pressed";
}

TEST(AttachTest, ALiveSessionIsRefusedWithTheFixAtOnceWhereNothingIsWaitedFor) {
  FakeDaemon daemon;
  daemon.RefuseAttach({kTaken, 0});
  Trainer trainer(daemon.address());
  const absl::Status status = trainer.client->Attach({.run_id = "r", .wait_s = 0}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("rank 0 of run 'r'"), HasSubstr("takeover=true")));
  EXPECT_TRUE(trainer.Attach().ok()) << "a refused Attach leaves the client as it was";
}

TEST(AttachTest, TakeoverIsSaidToTheDaemon) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.client->Attach({.run_id = "r", .takeover = true}).ok());
  EXPECT_TRUE(daemon.seen().attaches.at(0).takeover());
}

TEST(AttachTest, ARefusedStreamFailsTheAttach) {
  FakeDaemon daemon({.cut_at_received = 0});
  Trainer trainer(daemon.address(), /*reconnect_timeout_s=*/0);
  EXPECT_EQ(trainer.Attach().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace ballast
