// The shared-memory transport byte by byte: what it hands out, to whom, and what becomes of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "absl/strings/match.h"

#include "server/slots/slot_shape.h"
#include "tests/eventually.h"
#include "tests/server/no_threads.h"
#include "tests/server/shm/shm_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Eq;
using ::testing::Ge;
using ::testing::Gt;
using ::testing::HasSubstr;

TEST_F(ShmRpcTest, IsOfferedAndTrainsInPlace) {
  Raw raw = StartRaw(SmallSpec());
  EXPECT_THAT(raw.grant.lanes(), ElementsAre("grpc", "shm"));
  for (uint64_t step = 1; step <= 3; ++step) ExpectStep(&raw, step);
  EXPECT_THAT(Status("r1").ranks(), ElementsAre(AllOf(HasSubstr("connected"), HasSubstr("transport shm"))));
}

TEST_F(ShmRpcTest, TheSegmentHoldsTheWindowAndLittleMore) {
  const Raw raw = StartRaw(SmallSpec());
  const Plan plan = MakePlan(raw.spec);
  const ShmShape shape = raw.trainer->segment->shape();
  EXPECT_EQ(shape, ShapeOf(raw.spec, plan));
  EXPECT_GE(shape.gradient_slots * shape.gradient_slot_bytes, plan.window_bytes);
  EXPECT_LE(ShmBytes(shape), plan.window_bytes + kLeastGradientSlots * shape.gradient_slot_bytes +
                                 (SendBuffersOfARank(raw.spec) + kMoreWeightSlots) * plan.send_buffer_bytes +
                                 2 * kPipeBytes + 5 * 4096);
}

TEST_F(ShmRpcTest, AGradientStaysInItsSlotUntilItIsSummed) {
  Raw raw = StartRaw(SmallSpec(), 2);
  const v1::AttachResponse other = AttachFresh("r1", false, 1, 2);
  const auto second = Ask(other, other.session_token());
  ASSERT_TRUE(second.ok()) << second.status();
  (*second)->Open(other.session_token());
  raw.trainer->Begin(1);
  (*second)->Begin(1);
  const v1::Gradient chunk = Chunks(raw.spec, 0, Gradient(raw.spec, 0, 1))[0];
  raw.trainer->Chunk(chunk);
  raw.trainer->Chunk(Chunks(raw.spec, 0, Gradient(raw.spec, 0, 1))[1]);
  EXPECT_SOON(Status("r1").received_bytes(), Ge(2 * chunk.data().size()));
  EXPECT_EQ(raw.trainer->lender.returned(), 0u);
  (*second)->Chunk(chunk);
  EXPECT_SOON((*second)->lender.returned(), 1u);
  EXPECT_SOON(raw.trainer->lender.returned(), 1u);
}

TEST_F(ShmRpcTest, WithoutAThreadForItATrainerIsRefusedAndOthersGoOn) {
  const Raw raw = StartRaw(SmallSpec(), 2);
  const v1::AttachResponse other = AttachFresh("r1", false, 1, 2);
  absl::Status refused;
  {
    const NoThreads none;
    refused = Ask(other, other.session_token()).status();
  }
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("the system refused a thread"));
  const auto later = Ask(other, other.session_token());
  EXPECT_TRUE(later.ok()) << later.status();
  EXPECT_SOON(metrics_.Serialize(), HasSubstr("\nballast_streams 2\n"));
}

TEST_F(ShmRpcTest, OnlyATokenOpensIt) {
  const Raw raw = StartRaw(SmallSpec());
  EXPECT_EQ(Ask(raw.grant, std::string(16, 'x')).status().code(), absl::StatusCode::kNotFound);
  // A second for the one that was lost; more hold the daemon's memory for nothing.
  const auto second = Ask(raw.grant, raw.grant.session_token());
  EXPECT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(Ask(raw.grant, raw.grant.session_token()).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(ShmRpcTest, ASegmentOpensNoOtherSession) {
  v1::RunSpec other_spec = SmallSpec();
  other_spec.set_run_id("r2");
  const Raw raw = StartRaw(SmallSpec()), other = StartRaw(other_spec);
  const auto asked = Ask(raw.grant, raw.grant.session_token());
  ASSERT_TRUE(asked.ok());
  (*asked)->Open(other.grant.session_token());
  const absl::Status refused = (*asked)->Finish();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("another token"));
}

TEST_F(ShmRpcTest, SilentAndNonsensicalGuestsAreDismissedAndDisturbNobody) {
  Raw raw = StartRaw(SmallSpec());
  const ShmSocket silent = ShmSocket::Connect(raw.grant.shm_socket()).value();
  const ShmSocket talks = ShmSocket::Connect(raw.grant.shm_socket()).value();
  ASSERT_EQ(send(talks.fd(), "GET / HTTP/1.0", 14, 0), 14);
  EXPECT_SOON(talks.HungUp(), true);
  ExpectStep(&raw, 1);
}

// The trainer lives on and beats, but never sends Open.
TEST_F(ShmRpcTest, AStreamThatNeverSaysAnythingIsEnded) {
  server_.reset();
  Config config = DefaultConfig();
  config.limits.open_timeout_s = 0.2;
  StartServer(config);
  ASSERT_TRUE(CreateRun(SmallSpec()).ok());
  const v1::AttachResponse grant = AttachFresh("r1", false, 0, 1);
  const auto asked = Ask(grant, grant.session_token());
  ASSERT_TRUE(asked.ok()) << asked.status();
  const absl::Status ended = (*asked)->Finish();
  EXPECT_EQ(ended.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(ended.message()), HasSubstr("limits.open_timeout"));
}

// A trainer that was killed: its end of the socket closes.
TEST_F(ShmRpcTest, ATrainerThatIsGoneIsNoticedAndItsGradientsStay) {
  Raw raw = StartRaw(SmallSpec());
  raw.trainer->Begin(1);
  const auto chunks = Chunks(raw.spec, 0, Gradient(raw.spec, 0, 1));
  raw.trainer->Chunk(chunks[0]);
  raw.trainer->Chunk(chunks[1]);
  EXPECT_SOON(Status("r1").received_bytes(), Ge(2 * chunks[0].data().size()));
  raw.trainer->HangUp();
  EXPECT_SOON(Status("r1").ranks(), ElementsAre(HasSubstr("not connected")));
  const v1::AttachResponse resumed = Resume("r1", raw.grant.session_token());
  ASSERT_EQ(resumed.held_size(), 1);
  EXPECT_EQ(resumed.held(0).chunks(), std::string(1, '\3'));
  // Over the other transport.
  Wire wire(trainer_.get());
  ASSERT_TRUE(wire.Open(raw.grant.session_token()));
  wire.Begin(1);
  for (uint32_t i = 0; i < 3; ++i) {
    const std::string gradient = Gradient(raw.spec, i, 1);
    const auto all = Chunks(raw.spec, i, gradient);
    for (size_t k = i == 0 ? 2 : 0; k < all.size(); ++k) wire.Chunk(all[k]);
    raw.reference->Update(i, 1, gradient);
  }
  wire.EndStep();
  const StepAnswer answer = ReadStep(&wire);
  ASSERT_TRUE(answer.result);
  for (uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(Equal(answer, *raw.reference, i)) << i;
}

// The segments that this process has mapped, which is trainer and daemon.
int Segments() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += absl::StrContains(line, "memfd:ballast") ? 1 : 0;
  return count;
}

TEST_F(ShmRpcTest, TheSegmentOfATrainerThatIsGoneIsLetGo) {
  Raw raw = StartRaw(SmallSpec());
  ExpectStep(&raw, 1);
  ASSERT_THAT(Segments(), Gt(0));
  raw.trainer.reset();
  EXPECT_SOON(Status("r1").ranks(), ElementsAre(HasSubstr("not connected")));
  EXPECT_SOON(Segments(), Eq(0));
}

// A trainer that writes without a pause keeps its stream's thread from ever waiting, but not from its other work.
TEST_F(ShmRpcTest, TheDaemonBeatsWithEachRecordThatItReads) {
  constexpr uint64_t kRecords = 64;
  Raw raw = StartRaw(SmallSpec());
  const ShmControl& control = raw.trainer->segment->control();
  const auto read_all = [&] { return control.up_read.value == control.up_written.value; };
  while (!read_all()) raw.trainer->Beat();
  const uint64_t before = control.daemon_beats.value;
  for (uint64_t i = 0; i < kRecords; ++i) raw.trainer->Begin(1);  // it may come again
  while (!read_all()) raw.trainer->Beat();
  EXPECT_GE(control.daemon_beats.value - before, kRecords - 1);
  ExpectStep(&raw, 1);
}

// For a trainer that does not read, the daemon keeps a pipe and the weight slots, and nobody else waits.
TEST_F(ShmRpcTest, AStoppedReaderCostsTheOthersNothing) {
  v1::RunSpec spec = SmallSpec();
  spec.set_run_id("r2");
  Raw stopped = StartRaw(SmallSpec()), other = StartRaw(spec);
  for (uint32_t i = 0; i < 3; ++i) stopped.reference->Update(i, 1, Gradient(stopped.spec, i, 1));
  stopped.trainer->Begin(1);
  for (uint32_t i = 0; i < 3; ++i) {
    for (const v1::Gradient& chunk : Chunks(stopped.spec, i, Gradient(stopped.spec, i, 1))) {
      EXPECT_SOON(stopped.trainer->lender.free(), Gt(0u));
      stopped.trainer->Chunk(chunk);
    }
  }
  stopped.trainer->End();
  for (uint64_t step = 1; step <= 5; ++step) {
    stopped.trainer->Beat();
    ExpectStep(&other, step);
  }
  const StepAnswer answer = stopped.trainer->Step();
  ASSERT_TRUE(answer.result);
  for (uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(Equal(answer, *stopped.reference, i)) << i;
}

}  // namespace
}  // namespace ballast::testing
