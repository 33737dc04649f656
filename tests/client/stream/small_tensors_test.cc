// Small tensors whose gradients leave, and whose weights come, several in one message.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

#include "tests/client/fake_daemon.h"
#include "tests/client/trainer.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kStepsEach = 2;

// What the daemon saw.
FakeDaemon::Seen Train(const FakeOptions& options) {
  FakeDaemon daemon(options);
  Trainer trainer(daemon.address());
  EXPECT_TRUE(trainer.Attach().ok());
  for (uint64_t step = 1; step <= kStepsEach; ++step) {
    const auto result = trainer.Step();
    EXPECT_TRUE(result.ok()) << result.status();
    for (uint32_t i = 0; i < 4; ++i) EXPECT_EQ(trainer.weights[i], Updated(trainer.Gradient(i, step), step)) << i;
  }
  return daemon.seen();
}

// Chunks that wait for the stream to come back leave together.
TEST(SmallTensorsTest, ACutAtAnyMessageIsInvisible) {
  const int messages = Train({}).received;
  ASSERT_GT(messages, 20);
  int joined = 0;
  for (int i = 0; i < messages; ++i) {
    SCOPED_TRACE(absl::StrCat("cut at message ", i));
    const FakeDaemon::Seen cut_up = Train({.cut_at_received = i, .joins_small = true, .acknowledges = false});
    const FakeDaemon::Seen cut_down = Train({.cut_at_sent = i, .joins_small = true});
    EXPECT_EQ(cut_up.duplicates + cut_down.duplicates, 0);
    joined += cut_up.joined;
    if (HasFailure()) return;
  }
  EXPECT_GT(joined, 0);
}

TEST(SmallTensorsTest, DamagedWeightsAreDataLoss) {
  FakeDaemon daemon({.chunk_elements = 64, .damages_weights = true, .joins_small = true});
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  const auto result = trainer.Step();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(trainer.client->BeginStep({}), result.status());
}

// What the message says that it has, and has not, is not read.
TEST(SmallTensorsTest, WeightsWithoutTheirBytesEndTheClient) {
  v1::TrainResponse good;
  v1::SmallWeights* small = good.mutable_small_weights();
  small->set_step(1);
  small->add_tensors(1);
  small->add_sizes(16);
  small->add_crc32c(0);
  small->set_data(std::string(16, '!'));
  const std::function<void(v1::SmallWeights*)> wrongs[] = {
      [](v1::SmallWeights* s) { s->set_sizes(0, 17); }, [](v1::SmallWeights* s) { s->clear_sizes(); },
      [](v1::SmallWeights* s) { s->clear_crc32c(); }, [](v1::SmallWeights* s) { s->set_tensors(0, 4); }};
  for (const auto& change : wrongs) {
    v1::TrainResponse bad = good;
    change(bad.mutable_small_weights());
    SCOPED_TRACE(bad.ShortDebugString());
    FakeDaemon daemon;
    Trainer trainer(daemon.address());
    ASSERT_TRUE(trainer.Attach().ok());
    ASSERT_TRUE(trainer.client->BeginStep({}).ok());
    ASSERT_TRUE(trainer.Push(1).ok());
    daemon.Inject(bad);  // goes out with the answer to what comes next
    const auto result = trainer.client->EndStep({}).get();
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("without their bytes"));
  }
}

}  // namespace
}  // namespace ballast
