// Push with a full buffer, against a transport that takes what the test gives credit for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/cpp/stream/step_stream.h"
#include "tests/client/fake_daemon.h"
#include "tests/client/told_lines.h"
#include "tests/client/transport/scripted_transport.h"
#include "tests/eventually.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kChunk = 4096, kTensors = 6;  // elements; each tensor has one chunk
constexpr uint64_t kBytes = 4 * kChunk;

v1::RunSpec Spec() {
  v1::RunSpec spec = FakeSpec();
  spec.clear_tensors();
  for (uint64_t i = 0; i < kTensors; ++i) {
    v1::TensorSpec* const tensor = spec.add_tensors();
    tensor->set_name(absl::StrCat("t", i));
    tensor->set_dtype("fp32");
    tensor->add_shape(kChunk);
  }
  return spec;
}

// The daemon has credit for one gradient; two may wait here.
class GradientBufferTest : public ::testing::Test {
 protected:
  void Start(double wait_s = 3600) {
    connection_ =
        Connection::Open(
            {.server = daemon_.address(), .log = told_.log(), .interrupted = [this] { return interrupted_.load(); }})
            .value();
    v1::AttachResponse grant;
    grant.set_session_token("token");
    grant.set_resume_step(1);
    grant.set_chunk_elements(kChunk);
    grant.set_credit_bytes(kBytes);
    AttachOptions options{.run_id = "r"};
    options.gradient_buffer_bytes = 2 * kBytes;
    options.gradient_wait_s = wait_s;
    stream_ = StepStream::Start(*connection_, options, grant, TensorTable::Create(Spec(), kChunk).value(),
                                [this](const v1::AttachResponse&) -> absl::StatusOr<std::unique_ptr<Transport>> {
                                  return std::make_unique<ScriptedTransport>(script_);
                                })
                  .value();
    ASSERT_TRUE(stream_->BeginStep({}).ok());
  }

  absl::Status Push(uint32_t tensor) {
    return stream_->Push(tensor, BytesOf(std::string(stream_->tensors()[tensor].gradient_bytes(), 'g')));
  }
  // Tensors from 0, on a thread of its own; how many were pushed is in pushed_.
  std::thread PushAll() {
    return std::thread([this] {
      for (uint32_t i = 0; i < kTensors && status_.ok(); ++i) {
        status_ = Push(i);
        ++pushed_;
      }
    });
  }
  // Until the stream has carried so many, in all steps.
  void AwaitGradients(uint64_t gradients) {
    for (size_t messages = 1; gradients > 0; ++messages) {
      if (script_->AwaitWritten(messages)[messages - 1].has_gradient()) --gradients;
    }
  }
  void Acknowledge(uint64_t gradients) {
    v1::TrainResponse credit;
    credit.mutable_credit()->set_bytes(kBytes);
    credit.mutable_credit()->set_acknowledged(gradients);
    script_->Say(credit);
  }
  void Close() {
    v1::TrainResponse closed;
    closed.mutable_step_result()->set_step(stream_->step());
    closed.mutable_step_result()->set_outcome(v1::STEP_OUTCOME_SKIPPED);
    script_->Say(closed);
  }
  uint64_t MostBuffered() {
    auto future = stream_->EndStep({}, {});
    Close();
    const auto result = future.get();
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? result->timing.buffered_bytes_most : 0;
  }

  FakeDaemon daemon_{{.spec = Spec(), .chunk_elements = kChunk}};
  ToldLines told_;
  std::atomic<bool> interrupted_ = false;
  std::atomic<int> pushed_ = 0;
  absl::Status status_;  // of PushAll
  std::unique_ptr<Connection> connection_;
  const std::shared_ptr<Script> script_ = std::make_shared<Script>();
  std::unique_ptr<StepStream> stream_;
};

TEST_F(GradientBufferTest, PushWaitsForTheDaemonOnceTheBufferIsFull) {
  Start();
  std::thread pushing = PushAll();
  for (uint64_t taken = 1; taken <= kTensors; ++taken) {
    AwaitGradients(taken);
    EXPECT_LE(pushed_, static_cast<int>(taken) + 2) << "what is taken, and what the buffer holds, with one on its way";
    Acknowledge(taken);
  }
  pushing.join();
  EXPECT_TRUE(status_.ok()) << status_;
  EXPECT_EQ(MostBuffered(), 2 * kBytes);
  EXPECT_THAT(told_.lines(), ElementsAre());
}

TEST_F(GradientBufferTest, PushDoesNotWaitWhereTheDaemonWantsWhatIsStillToBePushed) {
  Start();
  std::thread pushing = PushAll();
  AwaitGradients(1);
  v1::TrainResponse wants;
  wants.mutable_credit()->mutable_wanted()->set_tensor(kTensors - 1);
  script_->Say(wants);
  pushing.join();
  EXPECT_TRUE(status_.ok()) << status_;
  EXPECT_EQ(script_->AwaitWritten(4)[3].gradient().tensor(), kTensors - 1) << "it goes without credit";
  EXPECT_EQ(MostBuffered(), kTensors * kBytes);
}

TEST_F(GradientBufferTest, WhereTheDaemonTakesNothingForTooLongAllIsKeptFromThenOn) {
  Start(/*wait_s=*/0.05);
  PushAll().join();
  EXPECT_TRUE(status_.ok()) << status_;
  EXPECT_EQ(MostBuffered(), kTensors * kBytes);
  ASSERT_TRUE(stream_->BeginStep({}).ok());
  PushAll().join();
  EXPECT_EQ(MostBuffered(), kTensors * kBytes);
  EXPECT_THAT(told_.lines(), ElementsAre(HasSubstr("32768 bytes of gradients wait here, and the daemon has taken none "
                                                   "for 0.05 s")));
}

TEST_F(GradientBufferTest, WhoIsInterruptedHasPushedAllTheSameAndWaitsInTheNextStep) {
  Start();
  interrupted_ = true;
  PushAll().join();
  EXPECT_TRUE(status_.ok()) << status_;
  EXPECT_EQ(MostBuffered(), kTensors * kBytes);
  interrupted_ = false;
  ASSERT_TRUE(stream_->BeginStep({}).ok());
  std::thread pushing = PushAll();
  for (uint64_t taken = 1; taken <= 1 + kTensors; ++taken) {  // the first is the step's before
    AwaitGradients(taken);
    Acknowledge(taken);
  }
  pushing.join();
  EXPECT_EQ(MostBuffered(), 2 * kBytes);
}

TEST_F(GradientBufferTest, AStepThatHasClosedAndAClientThatHasFailedEndTheWait) {
  Start();
  std::thread pushing = PushAll();
  AwaitGradients(1);
  Close();
  pushing.join();
  EXPECT_TRUE(status_.ok()) << status_;
  EXPECT_EQ(stream_->EndStep({}, {}).get()->result.outcome(), v1::STEP_OUTCOME_SKIPPED);
  ASSERT_TRUE(stream_->BeginStep({}).ok());
  std::thread again = PushAll();
  v1::TrainResponse wrong;
  wrong.mutable_weights()->set_step(stream_->step());
  wrong.mutable_weights()->set_tensor(kTensors);
  script_->Say(wrong);
  again.join();
  EXPECT_THAT(std::string(status_.message()), HasSubstr("the daemon sent weights of"));
}

}  // namespace
}  // namespace ballast
