// Slots in the memory of the daemon's GPU, byte by byte, by a trainer of bad faith.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"

#include "server/shm/shm_shape.h"
#include "tests/eventually.h"
#include "tests/server/shm/shm_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

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
  // Another segment of the session, with slots on the GPU.
  absl::Status AskAgain(OnGpu* raw) {
    auto socket = ShmSocket::Connect(raw->grant.shm_socket());
    if (!socket.ok()) return socket.status();
    ShmGpuHello hello;
    raw->grant.session_token().copy(hello.token.data(), hello.token.size());
    auto answer = socket->AskForGpu(hello, 10);
    if (!answer.ok()) return answer.status();
    EXPECT_EQ(answer->why_none, "");
    raw->memory = std::make_unique<Mapped>(answer->gpu_memory.fd(), GpuSlotBytes(answer->segment->shape()));
    raw->trainer = std::make_unique<RawTrainer>(*std::move(socket), std::move(answer->segment), raw->memory->at());
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

}  // namespace
}  // namespace ballast::testing
