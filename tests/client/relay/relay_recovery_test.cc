// What a relay makes of an upstream that says what a test has it say: nothing that is damaged, out of order or lost comes
// to its readers, who keep what they have.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/client/follow/reader.h"
#include "tests/client/relay/relay_daemon.h"
#include "tests/eventually.h"

namespace ballast {
namespace {

using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class RelayRecoveryTest : public ::testing::Test {
 protected:
  // One that has the first version, which comes whole.
  std::unique_ptr<Reader> ReaderOfFirst() {
    upstream_.Say(first_.Whole());
    auto reader = std::make_unique<Reader>(relay_.address());
    EXPECT_EQ(reader->Next().step, 1u);
    reader->Expect(first_);
    return reader;
  }
  double Failures(const std::string& reason) const {
    return MetricOf(relay_, "ballast_relay_failures_total{reason=\"" + reason + "\",run_id=\"r\"}").value_or(-1);
  }
  FakeFollowService upstream_;
  const RealDaemon relay_{RelayOf(upstream_.address(), {"r"})};
  const FollowedRun first_{kFollowedSpec, 1}, second_ = first_.Next(), third_ = second_.Next();
};

TEST_F(RelayRecoveryTest, VersionsPassAsTheyCame) {
  upstream_.Say(first_.Whole());
  Reader reader(relay_.address());
  const FollowedVersion whole = reader.Next();
  EXPECT_EQ(whole.step, 1u);
  EXPECT_EQ(whole.closed_unix_s, 1e9 + 1);
  reader.Expect(first_);
  upstream_.Say(Batched(second_.ChangesOf(first_)));
  const FollowedVersion changes = reader.Next();
  EXPECT_EQ(changes.base_step, 1u);
  const VersionParts said = second_.ChangesOf(first_);
  EXPECT_EQ(changes.received_bytes, said[0].begin().bytes());
  EXPECT_EQ(changes.changed_elements, said.back().end().changed());
  reader.Expect(second_);
}

TEST_F(RelayRecoveryTest, DamagedChangesAreAskedForWhole) {
  const auto reader = ReaderOfFirst();
  VersionParts damaged = second_.ChangesOf(first_);
  damaged[1].mutable_chunk()->set_crc32c(1);
  upstream_.Say(damaged);
  const auto requests = upstream_.AwaitRequests(2);
  EXPECT_FALSE(requests[1].has_have());
  EXPECT_THAT(requests[1].digests(), IsEmpty());
  reader->Expect(first_);
  upstream_.Say(second_.Whole());
  EXPECT_EQ(reader->Next().step, 2u);
  reader->Expect(second_);
  EXPECT_EQ(Failures("damaged"), 1);
}

TEST_F(RelayRecoveryTest, ATensorWithAnotherDigestIsAskedForAgain) {
  VersionParts wrong = first_.Whole();
  for (v1::VersionPart& part : wrong) {
    if (part.has_chunk() && part.chunk().last()) part.mutable_chunk()->set_digest(7);
  }
  upstream_.Say(wrong);
  upstream_.AwaitRequests(2);
  ReaderOfFirst();
  EXPECT_EQ(Failures("damaged"), 1);
}

TEST_F(RelayRecoveryTest, AfterACutItAsksForWhatHasChangedSince) {
  const auto reader = ReaderOfFirst();
  const VersionParts changes = second_.ChangesOf(first_);
  upstream_.Say({changes[0], changes[1]});
  upstream_.Cut();
  const auto requests = upstream_.AwaitRequests(2);
  EXPECT_EQ(requests[1].have().step(), 1u);
  EXPECT_EQ(requests[1].digests_size(), static_cast<int>(first_.codes.size()));
  upstream_.Say(changes);
  EXPECT_EQ(reader->Next().base_step, 1u);
  reader->Expect(second_);
}

// A daemon that was started anew knows no version of before, but what its tensors are.
TEST_F(RelayRecoveryTest, TensorsThatAreAsTheyWereDoNotComeAgain) {
  const auto reader = ReaderOfFirst();
  upstream_.Cut();
  upstream_.AwaitRequests(2);
  FollowedRun other = first_;
  other.generation = 2;
  other.codes[1][0] ^= 1;
  std::vector<uint32_t> same;
  for (uint32_t i = 0; i < first_.codes.size(); ++i) {
    if (i != 1) same.push_back(i);
  }
  upstream_.Say(other.Whole(same));
  const FollowedVersion version = reader->Next();
  EXPECT_EQ(version.generation, 2u);
  EXPECT_EQ(version.base_step, 1u) << "its readers are sent only what came";
  EXPECT_THAT(version.changed, ::testing::ElementsAre(1u));
  reader->Expect(other);
}

TEST_F(RelayRecoveryTest, WhatIsLeftOutUnaskedIsRefused) {
  upstream_.Say(first_.Whole({1}));
  upstream_.AwaitRequests(2);
  ReaderOfFirst();
  EXPECT_EQ(Failures("damaged"), 1);
}

TEST_F(RelayRecoveryTest, AnUpstreamThatIsGoneLeavesWhatThereIs) {
  const auto reader = ReaderOfFirst();
  upstream_.Shutdown();
  const BareClient client(relay_.address());
  EXPECT_SOON(client.Listed("r").relay().connected(), Eq(false));
  EXPECT_THAT(client.Failure("r"), ::testing::Not(IsEmpty()));
  Reader late(relay_.address());
  EXPECT_EQ(late.Next().closed_unix_s, 1e9 + 1) << "how old it is, is said";
  late.Expect(first_);
  EXPECT_GE(Failures("unreachable"), 1);
}

TEST_F(RelayRecoveryTest, ARunWithoutWeightsIsWaitedFor) {
  upstream_.End({grpc::StatusCode::FAILED_PRECONDITION, "no weights yet"});
  upstream_.End({grpc::StatusCode::FAILED_PRECONDITION, "no weights yet"});
  upstream_.AwaitRequests(1);
  const BareClient client(relay_.address());
  EXPECT_SOON(client.Failure("r"), HasSubstr("no weights yet"));
  EXPECT_SOON(MetricOf(relay_, "ballast_relay_connected{run_id=\"r\"}"), ::testing::Optional(0));
  Reader reader(relay_.address());
  upstream_.AwaitRequests(3);
  upstream_.Say(first_.Whole());
  reader.Next();
  reader.Expect(first_);
}

TEST_F(RelayRecoveryTest, ADaemonThatTakesNoMoreReadersIsAskedWhenItSays) {
  upstream_.End({grpc::StatusCode::RESOURCE_EXHAUSTED, "16 readers follow run 'r'"}, /*retry_after_ms=*/20);
  upstream_.AwaitRequests(2);
  ReaderOfFirst();
}

TEST(RelayUpstreamTest, OneThatIsNotThereYetIsWaitedFor) {
  const RealDaemon relay(RelayOf("127.0.0.1:1", {"r"}));
  const BareClient client(relay.address());
  client.GetRun("r");
  EXPECT_EQ(client.error.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(client.error.error_message(), HasSubstr("127.0.0.1:1"));
  EXPECT_EQ(client.Listed("r").state(), v1::RUN_STATE_RELAYED);
}

}  // namespace
}  // namespace ballast
