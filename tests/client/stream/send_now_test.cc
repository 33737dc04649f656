// Gradients that Push writes where the daemon reads them, against a transport whose rooms the test gives.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/checksum.h"
#include "proto/gpu/gpu.h"

#include "client/cpp/stream/step_stream.h"
#include "tests/client/fake_cuda.h"
#include "tests/client/fake_daemon.h"
#include "tests/client/transport/scripted_transport.h"
#include "tests/eventually.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kChunkElements = 8192;  // 32 KiB in fp32
constexpr uint64_t kChunkBytes = 4 * kChunkElements;

// a: three chunks; b: one; small: less than is sent so.
v1::RunSpec LargeSpec() {
  v1::RunSpec spec = FakeSpec();
  spec.clear_tensors();
  for (const auto& [name, elements] : {std::pair{"a", 3 * kChunkElements}, {"b", kChunkElements}, {"small", 9ul}}) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(name);
    tensor->set_dtype("fp32");
    tensor->add_shape(static_cast<int64_t>(elements));
  }
  return spec;
}

class SendNowTest : public ::testing::Test {
 protected:
  // The stream's transports come from these scripts, one after the other.
  void Start(std::vector<std::shared_ptr<Script>> scripts, std::shared_ptr<Gpu> gpu = nullptr) {
    scripts_ = std::move(scripts);
    connection_ = Connection::Open({.server = daemon_.address(), .log = [](const std::string&) {}}).value();
    v1::AttachResponse grant;
    grant.set_session_token("token");
    grant.set_resume_step(1);
    grant.set_chunk_elements(kChunkElements);
    grant.set_credit_bytes(1 << 20);
    stream_ = StepStream::Start(
                  *connection_, {.run_id = "r"}, grant, TensorTable::Create(LargeSpec(), kChunkElements).value(),
                  [this](const v1::AttachResponse&) -> absl::StatusOr<std::unique_ptr<Transport>> {
                    return std::make_unique<ScriptedTransport>(scripts_[opened_++]);
                  },
                  std::move(gpu))
                  .value();
    ASSERT_TRUE(stream_->BeginStep({}).ok());
  }

  void Push(uint32_t tensor, char byte) {
    const std::string gradient(stream_->tensors()[tensor].gradient_bytes(), byte);
    const absl::Status status = stream_->Push(tensor, BytesOf(gradient));
    ASSERT_TRUE(status.ok()) << status;
  }

  // Of the first messages: each gradient's tensor, chunk, and byte.
  static std::vector<std::string> Gradients(Script& script, size_t messages) {
    std::vector<std::string> all;
    for (const v1::TrainRequest& request : script.AwaitWritten(messages)) {
      if (!request.has_gradient()) continue;
      const v1::Gradient& gradient = request.gradient();
      EXPECT_EQ(gradient.data(), std::string(gradient.data().size(), gradient.data()[0]));
      EXPECT_EQ(gradient.crc32c(), Crc32c(BytesOf(gradient.data())));
      all.push_back(absl::StrCat(gradient.tensor(), ".", gradient.chunk(), gradient.data().substr(0, 1)));
    }
    return all;
  }

  static v1::TrainResponse Acknowledging(uint64_t gradients) {
    v1::TrainResponse credit;
    credit.mutable_credit()->set_acknowledged(gradients);
    return credit;
  }
  void Close(Script& script, v1::StepOutcome outcome) {
    v1::TrainResponse closed;
    closed.mutable_step_result()->set_step(stream_->step());
    closed.mutable_step_result()->set_outcome(outcome);
    script.Say(closed);
  }

  FakeDaemon daemon_{{.spec = LargeSpec(), .chunk_elements = kChunkElements}};
  std::unique_ptr<Connection> connection_;
  std::vector<std::shared_ptr<Script>> scripts_;
  size_t opened_ = 0;
  std::unique_ptr<StepStream> stream_;
};

TEST_F(SendNowTest, ChunksGoToTheirRoomsInOrderWithWhatComesBeforeThem) {
  const auto script = std::make_shared<Script>();
  script->GiveRooms(8, kChunkBytes);
  Start({script});
  Push(0, 'x');
  EXPECT_EQ(script->written_at(), 3) << "Push returns when it has written them";
  Push(1, 'y');
  EXPECT_THAT(Gradients(*script, 2 + 4), ElementsAre("0.0x", "0.1x", "0.2x", "1.0y"));
  const auto written = script->AwaitWritten(3);
  EXPECT_EQ(written[0].step_begin().step(), 1u);
  EXPECT_TRUE(written[1].has_micro_begin());
  auto future = stream_->EndStep(1.0, {});
  EXPECT_TRUE(script->AwaitWritten(2 + 4 + 2).back().has_step_end());
  Close(*script, v1::STEP_OUTCOME_SKIPPED);
  const auto result = future.get();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->timing.pushed_bytes, 4 * kChunkBytes);
  EXPECT_EQ(result->timing.buffered_bytes_most, 0u);
}

TEST_F(SendNowTest, SmallOnesAndThoseThatFindNoRoomGoByTheWriter) {
  const auto script = std::make_shared<Script>();
  script->GiveRooms(2, kChunkBytes);
  Start({script});
  Push(2, 's');
  script->AwaitWritten(3);
  Push(0, 'x');
  Push(1, 'y');
  EXPECT_THAT(Gradients(*script, 2 + 5), ElementsAre("2.0s", "0.0x", "0.1x", "0.2x", "1.0y"));
  EXPECT_EQ(script->written_at(), 2);
}

// The small one waits for others, and leaves by the hand of who pushes the large one. On a machine that is busy the writer may
// have it in hand for so long that a copy is made.
TEST_F(SendNowTest, ALargeOneThatFollowsASmallOneIsNotCopiedForIt) {
  constexpr int kTries = 20;  // for which the credit lasts
  const auto script = std::make_shared<Script>();
  script->GiveRooms(8, kChunkBytes);
  Start({script});
  for (int step = 0; step < kTries; ++step) {
    ASSERT_TRUE(step == 0 || stream_->BeginStep({}).ok());
    Push(2, 's');
    Push(1, 'y');
    auto future = stream_->EndStep(1.0, {});
    script->AwaitWritten(6 * (static_cast<size_t>(step) + 1));
    Close(*script, v1::STEP_OUTCOME_SKIPPED);
    ASSERT_TRUE(future.get().ok());
  }
  EXPECT_GT(script->written_at(), 0u);
}

TEST_F(SendNowTest, ARoomIsKeptUntilTheDaemonHasTakenTheGradientIn) {
  const auto script = std::make_shared<Script>();
  script->GiveRooms(4, kChunkBytes);
  Start({script});
  Push(0, 'x');
  EXPECT_EQ(script->free_rooms(), 1u);
  script->Say(Acknowledging(2));
  EXPECT_SOON(script->free_rooms(), 3u);
  auto future = stream_->EndStep(1.0, {});
  Close(*script, v1::STEP_OUTCOME_SKIPPED);
  ASSERT_TRUE(future.get().ok());
  EXPECT_EQ(script->free_rooms(), 4u) << "those of a step that is over are free too";
}

TEST_F(SendNowTest, WhatWasNotTakenInGoesAgainAfterTheStreamIsLost) {
  const auto first = std::make_shared<Script>(), second = std::make_shared<Script>();
  first->GiveRooms(8, kChunkBytes);
  second->GiveRooms(8, kChunkBytes);
  Start({first, second});
  Push(0, 'x');
  first->Break();
  EXPECT_THAT(Gradients(*second, 2 + 3), ElementsAre("0.0x", "0.1x", "0.2x")) << "though the first's memory is gone";
  Push(1, 'y');
  EXPECT_THAT(Gradients(*second, 2 + 4), ElementsAre("0.0x", "0.1x", "0.2x", "1.0y"));
  EXPECT_EQ(second->free_rooms(), 8u - 1) << "what the step's buffer has needs no room to be kept in";
}

TEST_F(SendNowTest, AWriteThatFailsIsOfAChunkThatGoesAgain) {
  const auto first = std::make_shared<Script>(), second = std::make_shared<Script>();
  first->GiveRooms(8, kChunkBytes);
  Start({first, second});
  first->HoldGradients();
  std::thread pusher([this] { Push(0, 'x'); });
  first->AwaitHeldWrite();
  first->Break();
  pusher.join();
  EXPECT_THAT(Gradients(*second, 2 + 3), ElementsAre("0.0x", "0.1x", "0.2x"));
}

TEST_F(SendNowTest, AStepThatIsClosedTakesTheRestOfItsGradients) {
  const auto script = std::make_shared<Script>();
  script->GiveRooms(8, kChunkBytes);
  Start({script});
  Push(1, 'y');
  Close(*script, v1::STEP_OUTCOME_ABORTED);
  Push(0, 'x');
  const auto result = stream_->EndStep(1.0, {}).get();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->result.outcome(), v1::STEP_OUTCOME_ABORTED);
  EXPECT_EQ(script->free_rooms(), 8u);
}

// A writer in the middle of another gradient is not waited for long.
TEST_F(SendNowTest, WhileTheWriterIsHeldUpPushCopies) {
  const auto script = std::make_shared<Script>();
  Start({script});
  script->HoldGradients();
  Push(1, 'y');
  script->AwaitHeldWrite();
  script->GiveRooms(8, kChunkBytes);
  Push(0, 'x');
  EXPECT_EQ(script->written_at(), 0);
  script->LetGradientsGo();
  EXPECT_THAT(Gradients(*script, 2 + 4), ElementsAre("1.0y", "0.0x", "0.1x", "0.2x"));
}

// The daemon reads nothing for as long as another rank is awaited, say.
TEST_F(SendNowTest, WhereAWriteWouldWaitPushCopies) {
  const auto script = std::make_shared<Script>();
  script->GiveRooms(8, kChunkBytes);
  script->SetWritesAtOnce(false);
  Start({script});
  Push(0, 'x');
  EXPECT_EQ(script->free_rooms(), 8u) << "which Push keeps where it writes itself; the writer's are free at once";
  EXPECT_THAT(Gradients(*script, 2 + 3), ElementsAre("0.0x", "0.1x", "0.2x"));
}

// Who can write to the room is the daemon, which may be dying.
TEST_F(SendNowTest, WhatIsSentAgainHasTheChecksumOfWhatWasPushed) {
  const auto first = std::make_shared<Script>(), second = std::make_shared<Script>();
  first->GiveRooms(8, kChunkBytes);
  Start({first, second});
  Push(1, 'y');
  first->Scribble();
  first->Break();
  const v1::Gradient again = second->AwaitWritten(3).back().gradient();
  EXPECT_NE(again.data(), std::string(kChunkBytes, 'y'));
  EXPECT_EQ(again.crc32c(), Crc32c(BytesOf(std::string(kChunkBytes, 'y')))) << "so the daemon refuses it";
}

TEST_F(SendNowTest, AGradientThatCannotBeCopiedIsAnErrorOfItsPush) {
  constexpr int kTries = 20;  // on a machine that is busy the writer may have to copy
  int failed = 0;
  for (int i = 0; i < kTries && failed == 0; ++i) {
    const auto script = std::make_shared<Script>();
    script->GiveRooms(8, kChunkBytes);
    script->FailCopiesOf(std::this_thread::get_id());
    stream_.reset();
    opened_ = 0;
    Start({script});
    const absl::Status pushed = stream_->Push(1, BytesOf(std::string(kChunkBytes, 'y')));
    failed = script->failed_copies();
    EXPECT_EQ(pushed.ok(), failed == 0) << pushed;
  }
  EXPECT_GT(failed, 0);
}

// The rooms' memory is a GPU's then, and has no checksum that would show it.
TEST_F(SendNowTest, WhatTheGpuDoesNotGiveBackIsNotSentAgain) {
  const auto first = std::make_shared<Script>();
  first->GiveRooms(8, kChunkBytes);
  const auto found =
      reinterpret_cast<FakeCudaFunction>(dlsym(dlopen(FAKE_CUDA, RTLD_NOW | RTLD_LOCAL), "FakeCudaOfTests"));
  FakeCuda& cuda = *found();
  cuda.Reset();
  Start({first, std::make_shared<Script>()}, Gpu::Open(0, FAKE_CUDA).value());
  Push(0, 'x');
  cuda.ShutDown();
  first->Break();
  EXPECT_SOON(stream_->status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(stream_->status().message()), HasSubstr("cuCtxPushCurrent"));
  stream_.reset();
  EXPECT_EQ(opened_, 1u);
  cuda.Reset();
}

}  // namespace
}  // namespace ballast
