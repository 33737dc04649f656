// Slots in the memory of the daemon's GPU, byte by byte, by a trainer of bad faith.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/checksum.h"

#include "server/slots/slot_shape.h"
#include "tests/eventually.h"
#include "tests/server/shm/shm_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

// The fake GPU's memory as the trainer's GPU would see it.
class Mapped {
 public:
  Mapped(int fd, uint64_t bytes)
      : bytes_(bytes), at_(static_cast<std::byte*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0))) {}
  ~Mapped() { munmap(at_, bytes_); }
  std::byte* at() const { return at_; }

 private:
  const uint64_t bytes_;
  std::byte* const at_;
};

class GpuSlotsRpcTest : public ShmRpcTest {
 protected:
  void SetUp() override {
    Config config = DefaultConfig();
    config.shm_socket = absl::StrCat(::testing::TempDir(), "ballast-gpu-slots-", getpid(), ".sock");
    StartServer(config);
  }
  struct OnGpu : Raw {
    std::unique_ptr<Mapped> memory;
  };
  OnGpu StartOnGpu(uint32_t world = 1) {
    OnGpu raw{StartRaw(SmallSpec(), world), nullptr};
    raw.trainer->HangUp();
    EXPECT_SOON(AskAgain(&raw).code(), absl::StatusCode::kOk);
    return raw;
  }
  // *socket: over which the answer came; the stream ends with it.
  static absl::StatusOr<ShmSocket::GpuAnswer> AskForGpu(const Raw& raw, ShmSocket* socket) {
    auto connected = ShmSocket::Connect(raw.grant.shm_socket());
    if (!connected.ok()) return connected.status();
    *socket = *std::move(connected);
    ShmGpuHello hello;
    raw.grant.session_token().copy(hello.token.data(), hello.token.size());
    return socket->AskForGpu(hello, 10);
  }
  // Another segment of the session, with slots on the GPU.
  absl::Status AskAgain(OnGpu* raw) {
    ShmSocket socket;
    auto answer = AskForGpu(*raw, &socket);
    if (!answer.ok()) return answer.status();
    EXPECT_EQ(answer->why_none, "");
    raw->memory = std::make_unique<Mapped>(answer->gpu_memory.fd(), GpuSlotBytes(answer->segment->shape()));
    raw->trainer = std::make_unique<RawTrainer>(std::move(socket), std::move(answer->segment), raw->memory->at());
    raw->trainer->Open(raw->grant.session_token());
    return absl::OkStatus();
  }
};

TEST_F(GpuSlotsRpcTest, AStepIsMadeInThem) {
  OnGpu raw = StartOnGpu();
  EXPECT_EQ(raw.trainer->segment->shape(), GpuShapeOf(raw.spec, MakePlan(raw.spec)));
  for (uint64_t step = 1; step <= 3; ++step) ExpectStep(&raw, step, /*checksums=*/false);
  EXPECT_THAT(Status("r1").ranks(), ElementsAre(HasSubstr("transport gpu")));
}

TEST_F(GpuSlotsRpcTest, ASlotThatIsNotThereEndsTheStreamAndNothingElse) {
  OnGpu raw = StartOnGpu();
  raw.trainer->Begin(1);
  v1::TrainRequest request;
  *request.mutable_gradient() = Chunks(raw.spec, 0, Gradient(raw.spec, 0, 1))[0];
  request.mutable_gradient()->clear_data();
  raw.trainer->SendBody({.type = ShmRecord::kMessage, .slot = 100000, .payload_bytes = 8}, request.SerializeAsString());
  EXPECT_THAT(std::string(raw.trainer->Finish().message()), HasSubstr("slot 100000"));
  EXPECT_SOON(AskAgain(&raw).code(), absl::StatusCode::kOk);
  ExpectStep(&raw, 1, /*checksums=*/false);
}

// The host cannot read a slot there, and so cuts no weights in it.
TEST_F(GpuSlotsRpcTest, WeightsThatAreCutComeInTheRecord) {
  OnGpu raw{StartRaw(SmallSpec()), nullptr};
  raw.trainer->HangUp();
  v1::AttachRequest request;
  request.set_run_id("r1");
  request.set_takeover(true);
  v1::TensorCoverage* const coverage = request.add_coverage();  // of tensor 0, of 30,000 elements
  coverage->add_contributes()->set_end(30'000);
  coverage->add_receives()->set_end(10'000);
  const grpc::Status attached = Attach(request, &raw.grant);
  ASSERT_TRUE(attached.ok()) << attached.error_message();
  EXPECT_SOON(AskAgain(&raw).code(), absl::StatusCode::kOk);
  SendStep(&raw, 1);
  std::vector<std::pair<uint64_t, uint64_t>> in_slots, in_records;  // chunks of tensor 0, and their bytes
  ShmRecord record;
  for (v1::TrainResponse response; !response.has_step_result() && raw.trainer->Next(&record);) {
    ASSERT_TRUE(response.ParseFromString(raw.trainer->body()));
    const v1::Weights& weights = response.weights();
    if (record.slot != ShmRecord::kNoSlot) {
      if (weights.tensor() == 0) in_slots.push_back({weights.chunk(), record.payload_bytes});
      ASSERT_TRUE(raw.trainer->borrower.Borrow(record.slot, record.payload_bytes).ok());
      raw.trainer->GiveBack(record);
    } else if (response.has_weights()) {
      in_records.push_back({weights.chunk(), weights.data().size()});
      EXPECT_EQ(weights.crc32c(), Crc32c(std::as_bytes(std::span(weights.data()))));
    }
  }
  const uint64_t bytes = WireBytes(raw.spec.tensors[0].serving_format);
  EXPECT_THAT(in_slots, ElementsAre(Pair(0, 4096 * bytes), Pair(1, 4096 * bytes)));
  EXPECT_THAT(in_records, ElementsAre(Pair(2, (10'000 - 2 * 4096) * bytes)));
}

// What memory_limit leaves beside what runs take of the GPU: not of the host, as gradients and snapshots.
TEST_F(GpuSlotsRpcTest, SlotsCountAgainstMemoryLimitAndTheHostsMemoryDoesNot) {
  v1::RunSpec wire_spec = SmallSpec();
  wire_spec.mutable_rewind()->set_snapshots(4);
  Config config = config_;
  const RunSpec spec = ToRunSpec(wire_spec, config.limits).value();
  const Plan plan = MakePlan(spec);
  const uint64_t slots = GpuSlotBytes(GpuShapeOf(spec, plan));
  for (const uint64_t lacks : {1, 0}) {
    config.memory_limit = plan.bytes.on_device() + slots - lacks;
    server_.reset();
    StartServer(config);
    const Raw raw = StartRaw(wire_spec);
    raw.trainer->HangUp();
    ShmSocket socket;
    const auto answer = AskForGpu(raw, &socket);
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(answer->gpu_memory.fd() >= 0, lacks == 0) << answer->why_none;
    if (lacks != 0) {
      EXPECT_THAT(answer->why_none, HasSubstr(absl::StrCat(slots - 1, " of memory_limit are free")));
      continue;
    }
    wire_spec.set_run_id("r2");
    EXPECT_THAT(std::string(CreateRun(wire_spec).status().message()),
                HasSubstr(absl::StrCat("0 of ", config.memory_limit, " free")));
  }
}

}  // namespace
}  // namespace ballast::testing
