// The step's two threads against a transport whose writes take as long as the test wants.
#include "client/cpp/stream/step_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/checksum.h"

#include "tests/client/fake_daemon.h"
#include "tests/client/transport/scripted_transport.h"

namespace ballast {
namespace {

class StepStreamTest : public ::testing::Test {
 protected:
  StepStreamTest() {
    connection_ = Connection::Open({.server = daemon_.address(), .log = [](const std::string&) {}}).value();
    v1::AttachResponse grant;
    grant.set_session_token("token");
    grant.set_resume_step(1);
    grant.set_chunk_elements(4);
    grant.set_credit_bytes(1 << 20);
    stream_ = StepStream::Start(*connection_, {.run_id = "r"}, grant, TensorTable::Create(FakeSpec(), 4).value(),
                                [this](const v1::AttachResponse&) -> absl::StatusOr<std::unique_ptr<Transport>> {
                                  return std::make_unique<ScriptedTransport>(script_);
                                })
                  .value();
  }

  absl::Status Push(uint32_t tensor, char byte) {
    const std::string gradient(stream_->tensors()[tensor].gradient_bytes(), byte);
    return stream_->Push(tensor, BytesOf(gradient));
  }

  // Step 1 ends without this rank while a write of its tensor 0 waits; step 2 has begun.
  void LeaveAWriteBehind() {
    script_->HoldGradients();
    ASSERT_TRUE(stream_->BeginStep({}).ok());
    ASSERT_TRUE(Push(0, 'x').ok());
    script_->AwaitHeldWrite();
    v1::TrainResponse closed;
    closed.mutable_step_result()->set_step(1);
    closed.mutable_step_result()->set_outcome(v1::STEP_OUTCOME_ABORTED);
    script_->Say(closed);
    const auto result = stream_->EndStep({}, {}).get();
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_EQ(result->result.outcome(), v1::STEP_OUTCOME_ABORTED);
    ASSERT_TRUE(stream_->BeginStep({}).ok());
    ASSERT_EQ(stream_->step(), 2u);
  }

  // Expects that the gradients which follow the StepBegin of step 2 consist of this byte.
  void ExpectGradientsOf(char byte, size_t gradients) {
    size_t seen = 0;
    bool second = false;
    for (size_t messages = 1; seen < gradients; ++messages) {
      const v1::TrainRequest request = script_->AwaitWritten(messages)[messages - 1];
      second = second || request.step_begin().step() == 2;
      if (!second || !request.has_gradient()) continue;
      ++seen;
      const std::string& data = request.gradient().data();
      EXPECT_EQ(data, std::string(data.size(), byte)) << "chunk " << request.gradient().chunk();
      EXPECT_GT(data.size(), 0u);
      EXPECT_EQ(request.gradient().crc32c(), Crc32c(BytesOf(data)));
    }
  }

  FakeDaemon daemon_;
  std::unique_ptr<Connection> connection_;
  const std::shared_ptr<Script> script_ = std::make_shared<Script>();
  std::unique_ptr<StepStream> stream_;
};

TEST_F(StepStreamTest, AWriteThatOutlivesItsStepLeavesTheNextOnesGradientsAlone) {
  LeaveAWriteBehind();
  ASSERT_TRUE(Push(0, 'y').ok());
  script_->LetGradientsGo();
  ExpectGradientsOf('y', 3);
}

TEST_F(StepStreamTest, AWriteThatOutlivesItsStepMayBeOfATensorThatTheNextOneLacks) {
  LeaveAWriteBehind();
  script_->LetGradientsGo();
  ASSERT_TRUE(Push(1, 'y').ok());
  ExpectGradientsOf('y', 1);
}

// A step of several daemons is not to begin on the others for as long as a sleeping reader may take to look.
TEST_F(StepStreamTest, IsNotConnectedOnceTheDaemonIsGoneThoughTheReaderSleeps) {
  EXPECT_TRUE(stream_->AwaitConnected(absl::InfiniteDuration()));
  script_->HangUp();
  EXPECT_FALSE(stream_->AwaitConnected(absl::ZeroDuration()));
}

}  // namespace
}  // namespace ballast
