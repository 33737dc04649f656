// Trainers of bad faith on the shared-memory transport: they end their own stream, or spoil their own numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <thread>

#include "tests/eventually.h"
#include "tests/server/shm/shm_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::Ge;
using ::testing::HasSubstr;

struct Hostile {
  const char* name;
  std::function<void(RawTrainer&, const v1::Gradient&)> act;
  absl::StatusCode code;
  const char* says;
};

class HostileShmRpcTest : public ShmRpcTest, public ::testing::WithParamInterface<Hostile> {};

std::string GradientBody(v1::Gradient g) {
  v1::TrainRequest request;
  *request.mutable_gradient() = std::move(g);
  return request.SerializeAsString();
}

TEST_P(HostileShmRpcTest, AHostileTrainerEndsOnlyItsOwnStream) {
  v1::RunSpec other_spec = SmallSpec();
  other_spec.set_run_id("r2");
  Raw raw = StartRaw(SmallSpec()), other = StartRaw(other_spec);
  raw.trainer->Begin(1);
  GetParam().act(*raw.trainer, Chunks(raw.spec, 0, Gradient(raw.spec, 0, 1))[0]);
  const absl::Status s = raw.trainer->Finish();
  EXPECT_EQ(s.code(), GetParam().code) << s;
  EXPECT_THAT(std::string(s.message()), HasSubstr(GetParam().says));
  ExpectStep(&other, 1);
  // The session is not lost by it: a new segment, and its step goes on.
  auto again = Ask(raw.grant, raw.grant.session_token());
  ASSERT_TRUE(again.ok()) << again.status();
  raw.trainer = *std::move(again);
  raw.trainer->Open(raw.grant.session_token());
  ExpectStep(&raw, 1);
}

INSTANTIATE_TEST_SUITE_P(
    Trainer, HostileShmRpcTest,
    ::testing::Values(
        Hostile{"SlotOutOfRange",
                [](RawTrainer& raw, const v1::Gradient& g) {
                  raw.SendBody({.type = ShmRecord::kMessage, .slot = 100000, .payload_bytes = 8}, GradientBody(g));
                },
                absl::StatusCode::kInvalidArgument, "slot 100000"},
        Hostile{"PayloadLongerThanItsSlot",
                [](RawTrainer& raw, const v1::Gradient& g) {
                  raw.SendBody({.type = ShmRecord::kMessage, .slot = 0, .payload_bytes = 1u << 31}, GradientBody(g));
                },
                absl::StatusCode::kInvalidArgument, "payload of 2147483648 bytes"},
        Hostile{"SlotInUse",
                [](RawTrainer& raw, const v1::Gradient& g) {
                  const ShmRecord record{.type = ShmRecord::kMessage, .slot = 1, .payload_bytes = 8};
                  for (int i = 0; i < 2; ++i) raw.SendBody(record, GradientBody(g));
                },
                absl::StatusCode::kInvalidArgument, ""},
        Hostile{"WrongSize",
                [](RawTrainer& raw, v1::Gradient g) {
                  g.mutable_data()->resize(8);
                  g.set_crc32c(Crc32c(Bytes(g.data())));
                  raw.Chunk(g);
                },
                absl::StatusCode::kInvalidArgument, "has 8 bytes; wanted: 8192"},
        Hostile{"WrongChecksum",
                [](RawTrainer& raw, v1::Gradient g) {
                  g.set_crc32c(g.crc32c() + 1);
                  raw.Chunk(g);
                },
                absl::StatusCode::kDataLoss, "nothing of it was used"},
        Hostile{"DataAndSlot",
                [](RawTrainer& raw, const v1::Gradient& g) {
                  raw.SendBody({.type = ShmRecord::kMessage, .slot = 0, .payload_bytes = 8}, GradientBody(g));
                },
                absl::StatusCode::kInvalidArgument, "has no data itself"},
        Hostile{"SlotOfAnotherMessage",
                [](RawTrainer& raw, const v1::Gradient&) {
                  v1::TrainRequest request;
                  request.mutable_step_end();
                  raw.SendBody({.type = ShmRecord::kMessage, .slot = 0, .payload_bytes = 8},
                               request.SerializeAsString());
                },
                absl::StatusCode::kInvalidArgument, "goes with a Gradient"},
        Hostile{"NoMessage",
                [](RawTrainer& raw, const v1::Gradient&) {
                  raw.SendBody({.type = ShmRecord::kMessage}, "\xff\xff\xff\xff");
                },
                absl::StatusCode::kInvalidArgument, "is no TrainRequest"},
        Hostile{"Finish", [](RawTrainer& raw, const v1::Gradient&) { raw.SendBody({.type = ShmRecord::kFinish}, ""); },
                absl::StatusCode::kInvalidArgument, "does not finish"},
        Hostile{"Type", [](RawTrainer& raw, const v1::Gradient&) { raw.SendBody({.type = 77}, ""); },
                absl::StatusCode::kInvalidArgument, "the type 77"},
        Hostile{"BodyTooLong",
                [](RawTrainer& raw, const v1::Gradient&) {
                  // The rest never fits: what is refused is not read.
                  ShmRecordWriter writer(UpPipe(*raw.segment));
                  const ShmRecord record{.type = ShmRecord::kMessage, .body_bytes = 1u << 30, .sequence = 2};
                  const uint64_t at = raw.segment->control().up_written.value;
                  std::memcpy(raw.segment->up_pipe().data() + at, &record, sizeof record);
                  raw.segment->control().up_written.value = at + sizeof record;
                  raw.Ring();
                },
                absl::StatusCode::kResourceExhausted, "1073741824 bytes"},
        Hostile{"CounterBeyondTheRing",
                [](RawTrainer& raw, const v1::Gradient&) {
                  raw.segment->control().up_written.value = uint64_t{1} << 40;
                  raw.Ring();
                },
                absl::StatusCode::kDataLoss, "more than its pipe holds"},
        Hostile{"CounterRunsBack",
                [](RawTrainer& raw, const v1::Gradient&) {
                  raw.segment->control().up_written.value = 1;
                  raw.Ring();
                },
                absl::StatusCode::kDataLoss, "more than its pipe holds"},
        Hostile{"OpenTwice", [](RawTrainer& raw, const v1::Gradient&) { raw.Open(std::string(16, 'x')); },
                absl::StatusCode::kFailedPrecondition, "Open came twice"}),
    [](const auto& of) { return of.param.name; });

// The trainer denies what the daemon wrote: the daemon lets go of it.
TEST_F(ShmRpcTest, AReadersCounterThatLiesEndsTheStream) {
  Raw raw = StartRaw(SmallSpec());
  ShmRecord opened;
  ASSERT_TRUE(raw.trainer->Next(&opened));
  raw.trainer->segment->control().down_read.value = uint64_t{1} << 50;
  raw.trainer->Begin(1);
  raw.trainer->Chunk(Chunks(raw.spec, 0, Gradient(raw.spec, 0, 1))[0]);
  EXPECT_FALSE(raw.trainer->Finish().ok());
  auto again = Ask(raw.grant, raw.grant.session_token());
  ASSERT_TRUE(again.ok()) << again.status();
}

// All of the segment, bells, counters, marks and slots, under random writes while training goes on: its run may come to
// nothing, the daemon and the other run do not.
TEST_F(ShmRpcTest, ATrainerThatScribblesEverywhereHarmsItselfAlone) {
  v1::RunSpec other_spec = SmallSpec();
  other_spec.set_run_id("r2");
  Raw raw = StartRaw(SmallSpec()), other = StartRaw(other_spec);
  raw.trainer->Begin(1);
  std::atomic<bool> stop = false;
  std::thread scribbler([&] {
    uint64_t random = 88172645463325252u;
    auto* const words = reinterpret_cast<std::atomic<uint32_t>*>(&raw.trainer->segment->control());
    const uint64_t count = ShmBytes(raw.trainer->segment->shape()) / sizeof(uint32_t);
    while (!stop) {
      random ^= random << 13, random ^= random >> 7, random ^= random << 17;
      // Half of them in the first page, where the counters are.
      words[random % 2 == 0 ? (random >> 8) % 1024 : (random >> 8) % count] = static_cast<uint32_t>(random >> 32);
    }
  });
  for (uint64_t step = 1; step <= 5; ++step) ExpectStep(&other, step);
  stop = true;
  scribbler.join();
  raw.trainer->HangUp();
  // It can begin again.
  const v1::AttachResponse fresh = AttachFresh("r1", /*takeover=*/true);
  auto again = Ask(fresh, fresh.session_token());
  EXPECT_TRUE(again.ok()) << again.status();
}

// Gradients that change after their checksum was right.
TEST_F(ShmRpcTest, AGradientThatChangesInItsSlotIsSummedAsItIsThen) {
  Raw raw = StartRaw(SmallSpec(), 2);
  const v1::AttachResponse other = AttachFresh("r1", false, 1, 2);
  const auto second = Ask(other, other.session_token());
  ASSERT_TRUE(second.ok());
  (*second)->Open(other.session_token());
  raw.trainer->Begin(1);
  (*second)->Begin(1);
  const v1::Gradient chunk = Chunks(raw.spec, 2, Gradient(raw.spec, 2, 1))[0];
  const uint32_t slot = raw.trainer->Chunk(chunk);
  EXPECT_SOON(Status("r1").received_bytes(), Ge(chunk.data().size()));
  std::memset(raw.trainer->lender.at(slot).data(), 0xff, chunk.data().size());  // NaN, in every format
  (*second)->Chunk(chunk);
  v1::TrainRequest end;
  end.mutable_micro_end()->set_absent(std::string(1, '\3'));
  for (RawTrainer* t : {raw.trainer.get(), second->get()}) {
    t->Send(end);
    v1::TrainRequest last;
    last.mutable_step_end();
    t->Send(last);
  }
  const StepAnswer answer = raw.trainer->Step();
  ASSERT_TRUE(answer.result);
  EXPECT_GT(answer.result->rejected_blocks(), 0u);  // as for any other gradient that is not finite
}

}  // namespace
}  // namespace ballast::testing
